import os

import pytest
import torch

from gradwire.experiments.cli import main
from gradwire.experiments.compare import command as driver
from gradwire.experiments.compare.config import CompareConfig

from ..given import results_of, run_of
from .given import LEFT_BEHIND, results_in


def test_links_are_compared_one_after_the_other_and_only_times_differ(started, undrawn, tmp_path, capsys):
    started()
    short = ["--steps=3", "--eval-batches=1", "--compressors=none,onebit", "--link=100mbit,none"]
    assert main(["compare", "--model=mlp", "--data=digits", *short, f"--out={tmp_path}"]) == 0
    document, shown = results_in(tmp_path), capsys.readouterr().out
    networks = ["emulated link 100 Mbit/s", "no emulated link"]
    assert [run["network"] for run in document["runs"]] == [each for each in networks for _ in range(2)]
    assert document["environment"]["network"] == ", then ".join(networks)
    over, without = document["runs"][:2], document["runs"][2:]
    for name in ("compressor", "loss", "eval", "parameters_digest", "sent_bytes_per_step"):
        assert [run[name] for run in over] == [run[name] for run in without]
    assert shown.count("No verdict: 3 steps give 2 repeats") == 2
    assert shown.index(f"gloo on cpu, {networks[0]}\n".strip()) < shown.rindex(networks[1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 100}, 5),
        ({"steps": 12}, 2),
        ({"steps": 4}, 1),
        ({"steps": 100, "sync_every": 4}, 8),
        ({"steps": 100, "sync_every": 20}, 20),
    ],
)
def test_a_turn_is_whole_optimizer_steps_and_short(options, expected):
    assert CompareConfig(**options).turn_steps == expected


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """`gradwire compare` up to where ranks begin: the arguments of a rank, or of what starts ranks."""
    given = []

    def begin(*arguments):
        given.extend(arguments)
        results_of().write(tmp_path / "results.json")
        return 0

    def run(*options):
        given.clear()
        assert main(["compare", "--model=mlp", "--data=digits", f"--out={tmp_path}", *options]) == 0
        return given

    for name in ("run_rank", "supervised", "write_output"):
        monkeypatch.setattr(driver, name, begin)
    return run


PLACES = {"our own ranks": None, "rank 0 of a launcher": 0, "rank 1 of a launcher": 1}


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def told(request, started):
    """Where this process is started in three ways: whether it is the one that tells the user and writes."""
    if request.param is not None:
        started(rank=request.param, ranks=2)
    return request.param != 1


def test_a_warm_up_that_does_not_end_is_warned_of_once_in_synced_steps(told, compared, caplog):
    specs = "none,powersgd:rank=1,start_iter=1,powersgd:rank=1,start_iter=2"
    compared("--steps=5", "--sync-every=2", f"--compressors={specs}")
    warning = "powersgd:rank=1,start_iter=2 warms up for 2 optimizer steps, and the run has 2: its warm-up does not end"
    assert [warning in record.message for record in caplog.records] == [True] * told


def test_what_an_earlier_run_left_is_gone_before_ranks_begin_and_nothing_else(told, compared, tmp_path, monkeypatch):
    for name in (*LEFT_BEHIND, "notes.txt"):
        (tmp_path / name).write_text("of an earlier run")
    left = set()
    monkeypatch.setattr(driver.Results, "write", lambda results, path: left.update(tmp_path.iterdir()))
    monkeypatch.setattr(driver.Results, "read", lambda path: results_of(run_of()))
    compared()
    assert {file.name for file in left} == ({"notes.txt"} if told else {*LEFT_BEHIND, "notes.txt"})


def test_ranks_of_slurm_are_one_run_and_share_the_cores_of_their_node(compared, monkeypatch):
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    slurm = {"SLURM_PROCID": 5, "SLURM_STEP_NUM_TASKS": 8, "SLURM_LOCALID": 1, "SLURM_NODEID": 1}
    place = {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "MASTER_ADDR": "host0", "MASTER_PORT": 29500}
    for name, value in {**dict.fromkeys(mine, ""), **slurm, **place}.items():
        monkeypatch.setenv(name, str(value))
    for name in mine:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    threads = torch.get_num_threads()
    try:
        _, _, backend, launcher, out, rendezvous = compared()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert (backend, launcher, out, rendezvous) == ("gloo", "Slurm", None, None)
    assert [os.environ[name] for name in mine] == ["5", "8", "1", "4"]
