import json
import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from gradwire.ddp_core.transport import paced
from gradwire.experiments.cli import main
from gradwire.experiments.ranks import processes
from gradwire.experiments.ranks.launchers import LAB_VARIABLE
from gradwire.experiments.workloads.emulation import model

from ..ranks import PRELOADED

OURS = ("gradwire.experiments.bench.run", "gradwire.experiments.compare.command")
multiprocessing.set_forkserver_preload([*PRELOADED, "torchvision", "sklearn.datasets", *OURS])


@pytest.fixture(autouse=True, scope="module")
def quick_start():
    """The ranks of commands that run in this process are forked from one that has imported what takes seconds.

    Those of commands that tests start as processes are spawned, as users' are. Gives what spawns them.
    """
    start = processes.multiprocessing.start_processes

    def forked(rank, args, **kwargs):
        forkserver.ensure_running()
        parent = forkserver._forkserver._forkserver_pid
        placed = tuple(parent if each == os.getpid() else each for each in args)
        return start(rank, placed, **{**kwargs, "start_method": "forkserver"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes.multiprocessing, "start_processes", forked)
        yield start


class Clock:
    """The module time, for one process: nothing but sleeping takes time, and that a little more than asked for."""

    oversleep = 0.0003

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds):
        self.now += seconds + self.oversleep


@pytest.fixture
def clock(monkeypatch):
    """The clock of what emulates, so that tests do not depend on what else the machine does."""
    clock = Clock()
    for module in (paced, model):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def started(monkeypatch, unused_port):
    """Make this process a rank of its own, as torchrun would, or on a host of a lab."""

    def start(rank=0, ranks=1, lab=None):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": unused_port}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv(LAB_VARIABLE, raising=False)
        if lab:
            monkeypatch.setenv(LAB_VARIABLE, lab)

    threads = torch.get_num_threads()
    yield start
    torch.set_num_threads(threads)


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are files of a few bytes: to draw them takes longer than a small training."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, path, **options: Path(path).write_bytes(b"\x89PNG\r\n\x1a\n")
    )


@pytest.fixture
def plan(capsys):
    """What `gradwire plan` prints."""

    def get(*flags):
        capsys.readouterr()
        assert main(["plan", *flags]) == 0
        return capsys.readouterr().out

    return get


@pytest.fixture
def planned(plan):
    """What `gradwire plan --json` prints."""
    return lambda *flags: json.loads(plan("--json", *flags))
