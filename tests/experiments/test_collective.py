import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.ddp_core.transport.direct.torch_backend import LEAST_TORCH
from gradwire.ddp_core.transport.launchers import LAUNCHERS
from gradwire.experiments.cli import main
from gradwire.experiments.collective import command as driver
from gradwire.experiments.collective import measure

SMALL = ["collective", "--elements=100,1k", "--total=2500", "--repeats=1"]
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= LEAST_TORCH
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
    assert [(row["elements"], row["pieces"], row["world_size"]) for row in document["rows"]] == [
        (100, 25, 2),
        (1000, 3, 2),
    ]
    for row in document["rows"]:
        assert 0 < row["seconds"]["p50"] <= row["seconds"]["p95"]
        assert row["bytes_per_second"] == pytest.approx(4 * 2500 / row["seconds"]["p50"])
    assert "all-reduce of 2,500 float32, 2 ranks, gloo" in capfd.readouterr().out


@pytest.mark.skipif(not NEW_ENOUGH, reason="torch cannot have backends in Python")
def test_backends_take_turns_and_their_bandwidth_is_what_a_rank_must_send(tmp_path, capfd):
    file = tmp_path / "collectives.json"
    flags = ["--backend=gloo", "--against=gradwire,gloo", "--operations=all_gather,reduce_scatter,all_reduce"]
    sizes = ["--elements=1k,100k", "--pieces=2", "--repeats=2"]
    assert main(["collective", "--nproc=2", *flags, *sizes, f"--json={file}"]) == 0
    rows = json.loads(file.read_text())["rows"]
    found = [(row["elements"], row["operation"], row["backend"]) for row in rows]
    operations = ("all_gather", "reduce_scatter", "all_reduce")
    assert found == [(size, name, by) for size in (1000, 100000) for name in operations for by in ("gloo", "gradwire")]
    for row in rows:
        sent = 4 * 2 * row["elements"] * (1 if row["operation"] == "all_reduce" else 1 / 2)  # both pieces, of 2 ranks
        assert row["bus_bytes_per_second"] == pytest.approx(sent / row["seconds"]["p50"])
        assert row["link_share"] is None
        assert row["processor_seconds"]["p50"] > 0
    assert "all-gather and reduce-scatter and all-reduce, 2 ranks, gloo and gradwire" in capfd.readouterr().out


def sizes_in(file):
    return [row["elements"] for row in json.loads(file.read_text())["rows"]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_the_table_is_shown_where_the_file_cannot_be_written(started, capsys):
    started()
    assert main([*SMALL, "--json=/dev/full"]) == 2
    told = capsys.readouterr()
    assert TITLE in told.out
    assert "cannot write --json /dev/full: No space left on device" in told.err


def test_a_rank_of_a_launcher_that_is_stopped_shows_and_writes_what_it_has(started, interrupted, tmp_path, capsys):
    started()
    assert main([*SMALL, f"--json={tmp_path / 'a.json'}"]) == 130
    assert TITLE in capsys.readouterr().out
    assert sizes_in(tmp_path / "a.json") == [100]


@pytest.mark.parametrize("code", [130, 1])
def test_what_ranks_of_its_own_measured_before_they_ended_is_shown_and_written(
    code, started, interrupted, tmp_path, capsys, monkeypatch
):
    def cut_short(rank, nproc, *arguments):
        started()
        with pytest.raises(KeyboardInterrupt):
            rank(0, None, *arguments)
        return code

    monkeypatch.setattr(driver, "supervised", cut_short)
    assert main([*SMALL, f"--json={tmp_path / 'a.json'}"]) == code
    assert TITLE in capsys.readouterr().out
    assert sizes_in(tmp_path / "a.json") == [100]


def test_processes_of_another_launcher_are_ranks_of_one_measurement(started, monkeypatch):
    started()  # so that what becomes of these variables is undone
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    (slurm,) = (each for each in LAUNCHERS if each.name == "Slurm")
    monkeypatch.setenv(slurm.rank, "1")
    monkeypatch.setenv(slurm.size, "2")
    monkeypatch.setenv(slurm.local_rank, "0")
    ranks = []
    monkeypatch.setattr(driver, "_rank", lambda rank, rendezvous, *arguments: ranks.append((rank, rendezvous)))
    assert main(SMALL) == 0
    assert ranks == [(1, None)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--elements=many", "sizes are numbers of elements such as 100, 10k or 1M, got 'many'"),
        ("--elements=70M", "a piece of 70M is larger than the total of 60M"),
        ("--elements=", "name at least one size"),
        ("--operations=", "name at least one of all_reduce, all_gather, reduce_scatter"),
        ("--pieces=-1", "pieces is at least 1, or 0 for as many as make up the total; got -1"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, message, capsys):
    assert main(["collective", wrong]) == 2
    assert message in capsys.readouterr().err
