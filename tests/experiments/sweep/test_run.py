import multiprocessing
import os
import sys

import pytest
import torch

from gradwire import __version__
from gradwire.experiments.ranks.child import CommandFailure, run_to_end
from gradwire.experiments.sweep.config import SweepConfig
from gradwire.experiments.sweep.points import points_of
from gradwire.experiments.sweep.run import run_point

from ...forked import Script
from ..running import alive, descendants, spawned, wait_for
from .given import STUDY


@pytest.mark.slow
def test_a_point_is_a_process_and_its_failure_tells_what_it_wrote():
    config = SweepConfig(command="collective", base={"nproc": 1, "total": 10, "repeats": 1}, grid=[{"elements": [10]}])
    (point,) = points_of(config)
    finished = run_point(point, limit=100)
    assert finished.rows[0]["elements"] == finished.rows[0]["total_elements"] == 10
    assert finished.rows[0]["seconds.p50"] > 0
    assert finished.environment["cores"] == os.cpu_count()
    assert (finished.gradwire, finished.torch) == (__version__, torch.__version__)
    with pytest.raises(CommandFailure, match=r"took longer than 0.2 s: gradwire collective|took longer than 0.2 s"):
        run_point(point, limit=0.2)


@pytest.mark.slow
def test_a_real_interrupt_ends_the_point_and_its_ranks(tmp_path, study):
    study.write_text(STUDY.replace("total: 1000, repeats: 1", "total: 60M, repeats: 1000"))
    flags = ["sweep", f"--config={study}", f"--out={tmp_path / 'out'}"]
    script = Script(f"import sys; from gradwire.experiments.cli import main; sys.exit(main({flags!r}))")
    wait_for(lambda: spawned(descendants(script.pid)), "rank")
    started = descendants(script.pid)
    script.interrupt()
    done = script.end()
    assert done.code == 130, done.errors
    assert len(started) > 1
    wait_for(lambda: not any(map(alive, started)), "end of all")  # one that was killed may take a moment to go


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_point_dies_with_a_sweep_that_is_killed(tmp_path):
    note = tmp_path / "point"
    command = ["sh", "-c", f"echo $$ > {note}.part; mv {note}.part {note}; exec sleep 600"]
    owner = multiprocessing.get_context("fork").Process(
        target=run_to_end, args=("sleep", command, 600, tmp_path / "written")
    )
    owner.start()
    wait_for(note.exists, "point")
    point = int(note.read_text())
    owner.kill()
    owner.join()
    wait_for(lambda: not alive(point), "end of the point")
