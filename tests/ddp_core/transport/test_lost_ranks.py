"""Who has ended is told of ranks on this machine, whenever their processes go."""

import subprocess
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gradwire.ddp_core import obstacle
from gradwire.ddp_core.transport import lost_ranks

LOST = RuntimeError("Connection closed by peer")


class Group(SimpleNamespace):
    """Of a process group, what is asked for."""

    __hash__ = object.__hash__

    def rank(self):
        return 0


@pytest.fixture
def other():
    """A process of another rank."""
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


@pytest.fixture
def group(other):
    """Rank 0's, with rank 1 on this machine, and rank 2 on another one."""
    group = Group()
    lost_ranks.meet(group, [lost_ranks.place(), f"{lost_ranks.machine()} {other.pid}", "elsewhere 1"])
    return group


def test_a_rank_that_is_there_is_not_named(group):
    assert lost_ranks.explained(LOST, group) == str(LOST)


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_one_that_has_ended_is(group, other):
    other.kill()
    assert lost_ranks.explained(LOST, group) == f"{LOST}; rank 1 has ended"


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_a_rank_of_a_part_of_the_world_is_named_by_its_number_there(group, other, monkeypatch):
    monkeypatch.setattr(dist, "get_process_group_ranks", {group: [4, 7, 9]}.get)
    other.kill()
    assert lost_ranks.explained(LOST, group) == f"{LOST}; rank 7 has ended"


def test_one_that_goes_between_two_looks_is(group, other, monkeypatch):
    """Its file in /proc is there first, and when it is to be opened it is not."""
    real = lost_ranks.Processes

    def later(known):
        other.kill()
        other.wait()
        return real(known)

    monkeypatch.setattr(lost_ranks, "Processes", later)
    assert lost_ranks.explained(LOST, group) == f"{LOST}; rank 1 has ended"


def test_a_rank_that_stops_within_the_call_is_said_to_hang(monkeypatch):
    store, group = dist.HashStore(), Group(size=lambda: 2)
    monkeypatch.setattr(lost_ranks, "_presence", lambda group: store)
    store.set("at/1", "1")
    with pytest.raises(
        RuntimeError, match=r"gave up: all ranks called, and have waited 0 s for one of them, which hangs or has died"
    ):
        lost_ranks.await_all(group, "called", "call it there, too", timedelta(seconds=0.3))


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_a_rank_that_announces_itself_late_and_ends_is_named_long_before_the_limit(other, monkeypatch):
    monkeypatch.setattr(lost_ranks, "PATIENCE", 0.1)
    store, group = dist.HashStore(), Group(size=lambda: 2)
    monkeypatch.setattr(lost_ranks, "_presence", lambda group: store)
    store.set("process/0", lost_ranks.place())
    with pytest.raises(RuntimeError, match=r"gave up: ranks \[0\] called"):  # what this call sees is not all
        lost_ranks.await_all(group, "called", "call it there, too", timedelta(seconds=0.3))
    threading.Timer(0.5, store.set, ["process/1", f"{lost_ranks.machine()} {other.pid}"]).start()
    threading.Timer(1.0, other.kill).start()
    with pytest.raises(RuntimeError, match=r"ranks \[1\] have ended"):
        lost_ranks.await_all(group, "called", "call it there, too", timedelta(seconds=20))
