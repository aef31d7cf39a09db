import json
import shlex
import sys

import pytest
import torch.distributed as dist

from gradwire.experiments.cli import main
from gradwire.experiments.collective import measure

SMALL = ["collective", "--elements=100,1k", "--total=2500", "--repeats=1"]
TITLE = "all-reduce of 2,500 float32, "


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C during the second size; the process group, which the end of the process would close, is closed."""
    measured = measure.seconds

    def seconds(pieces, group):
        if len(pieces) == 1:  # warms up for pieces of 1000
            raise KeyboardInterrupt
        return measured(pieces, group)

    monkeypatch.setattr(measure, "seconds", seconds)
    yield
    dist.destroy_process_group()


def test_it_measures_every_size_and_writes_rows(tmp_path, capfd, monkeypatch):
    file = tmp_path / "pieces.json"
    flags = ["--nproc=2", "--elements=100,1k", "--total=2500", "--repeats=2", f"--json={file}"]
    monkeypatch.setattr(sys, "argv", ["/bin/gradwire", "collective", *flags])
    assert main(sys.argv[1:]) == 0
    document = json.loads(file.read_text())
    assert document["kind"] == "collective"
    assert document["command"] == f"gradwire collective {shlex.join(flags)}"
    assert document["config"]["total"] == "2500"
    measured = [(row["elements"], row["pieces"], row["world_size"]) for row in document["rows"]]
    assert measured == [(100, 25, 2), (1000, 3, 2)]
    for row in document["rows"]:
        assert 0 < row["seconds"]["p50"] <= row["seconds"]["p95"]
        assert row["bytes_per_second"] == pytest.approx(4 * 2500 / row["seconds"]["p50"])
    assert "all-reduce of 2,500 float32, 2 ranks, gloo" in capfd.readouterr().out


def sizes_in(file):
    return [row["elements"] for row in json.loads(file.read_text())["rows"]]


def test_a_rank_of_a_launcher_that_is_stopped_shows_and_writes_what_it_has(started, interrupted, tmp_path, capsys):
    started()
    assert main([*SMALL, f"--json={tmp_path / 'a.json'}"]) == 130
    assert TITLE in capsys.readouterr().out
    assert sizes_in(tmp_path / "a.json") == [100]
