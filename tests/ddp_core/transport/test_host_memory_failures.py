"""Ranks that share memory: one that dies, hangs, gives up, closes, forks or is interrupted."""

import gc
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

import gradwire
from gradwire.ddp_core import obstacle
from gradwire.ddp_core.measure.step import Step

from ...ranks import LostRank, RankFailure
from ..errors import shorten, timed_message_of
from ..nets import ALWAYS, Batch, Net, loss_of

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())
SHORT, LONG = timedelta(seconds=1), timedelta(seconds=60)
HALF_A_SECOND = 0.5


def model_of(rank, **options):
    model = gradwire.DistributedDataParallel(Net(ALWAYS[:3]), bucket_cap_mb=0.001, **options)
    for step in range(2):
        loss_of(model(Batch.drawn(rank, step))).backward()
    assert model.reducer.assignment.shared
    return model


def with_a_fork(rank, world_size):
    """A child that has copies of all, and threads of its own, and ends, changes nothing."""
    gc.collect()  # process groups that earlier tests left here would be freed in the child, which lacks their threads
    model = model_of(rank)
    if (child := os.fork()) == 0:
        for _ in range(3):
            thread = threading.Thread(target=gc.collect)
            thread.start()
            thread.join()
        model.compression.close()
        del model
        gc.collect()
        os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    loss_of(model(Batch.drawn(rank, 2))).backward()
    return code


def test_a_forked_child_ends_without_touching_its_parent_s_sums(ranks):
    assert ranks.run(with_a_fork, 2) == [7, 7]


def error_of_the_next_step(rank, model):
    return timed_message_of(lambda: loss_of(model(Batch.drawn(rank, 2))).backward())


def beside_a_death(rank, world_size):
    model = model_of(rank)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    message, seconds = error_of_the_next_step(rank, model)
    raise RuntimeError(f"{seconds:.1f} s: {message}")


def test_a_rank_that_is_killed_is_named_within_seconds(ranks):
    first, dead, last = ranks.run(beside_a_death, 3, expect_errors=True)
    assert isinstance(dead, LostRank)
    for failure in (first, last):
        assert isinstance(failure, RankFailure)
        seconds, message = failure.message.split(" s: ")
        assert float(seconds) < 15
        assert "rank 1 has ended" in message or "has given up" in message
        assert message.startswith("RuntimeError: bucket 0 ")
    assert any("rank 1 has ended" in failure.message for failure in (first, last))


def without_an_answer(rank, world_size):
    model = model_of(rank, timeout=LONG)
    shorten(model.compression, SHORT, model.reducer)
    message, _ = error_of_the_next_step(rank, model) if rank == 0 else ("", 0.0)
    dist.barrier()
    return message


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(ranks):
    message, nothing = ranks.run(without_an_answer, 2)
    assert f"timed out after {SHORT}: of ranks [1] gradients are missing" in message
    assert not nothing


def beside_a_failure(rank, world_size):
    """What the others raise when rank 0's time is over, which have more of it."""
    model = model_of(rank, timeout=LONG)
    if rank == 0:
        shorten(model.compression, SHORT, model.reducer)
    message, seconds = error_of_the_next_step(rank, model) if rank < 2 else ("", 0.0)
    dist.barrier()
    return message, seconds


def test_a_rank_that_gives_up_has_the_others_raise(ranks):
    (own, _), (other, seconds), _ = ranks.run(beside_a_failure, 3)
    assert "timed out" in own
    assert "rank 0 has given up" in other
    assert seconds < 30


def beside_one_that_closes(rank, world_size, rebuilt):
    """What rank 0 raises, and when, where rank 1 ends its compression with nothing under way.

    With `rebuilt` no step has been made with the buckets that there are.
    """
    model = model_of(rank, timeout=LONG)
    if rebuilt:
        assignment = model.reducer.assignment
        assignment.build(assignment.order[::-1], model.compression.averager.allocator(model.device))
    if rank == 1:
        model.compression.close()
    message, seconds = error_of_the_next_step(rank, model) if rank == 0 else ("", 0.0)
    dist.barrier()
    return message, seconds


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_rank_that_closes_has_the_others_raise(ranks, rebuilt):
    (message, seconds), _ = ranks.run(beside_one_that_closes, 2, rebuilt)
    assert "rank 1 has given up" in message
    assert seconds < 30


def closed_after_a_loss(rank, world_size):
    """Seconds that closing takes while a sum is under way that a lost rank did not begin."""
    model = model_of(rank, timeout=LONG)
    dist.barrier()
    if rank == 1:
        os._exit(3)
    model.compression.averager.begin_step(Step())
    bucket = model.reducer.assignment.buckets[0]
    bucket.open(0.5)
    model.compression.averager.average(bucket)
    began = time.monotonic()
    model.compression.close()
    raise RuntimeError(f"{time.monotonic() - began:.1f}")


def test_closing_does_not_wait_for_a_rank_that_is_gone(ranks):
    failure, lost = ranks.run(closed_after_a_loss, 2, expect_errors=True)
    assert isinstance(lost, LostRank)
    assert float(failure.message) < 15


def interrupted(rank, world_size):
    """Ctrl-C while rank 0 waits for a sum."""
    model = model_of(rank, timeout=LONG)
    said = ""
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt = threading.Timer(HALF_A_SECOND, os.kill, (os.getpid(), signal.SIGINT))
        try:
            interrupt.start()  # a busy machine may be interrupted before backward begins
            loss_of(model(Batch.drawn(rank, 2))).backward()
        except (KeyboardInterrupt, RuntimeError) as error:
            said = type(error).__name__
    dist.barrier()
    return said


def test_a_wait_can_be_interrupted(ranks):
    assert ranks.run(interrupted, 2, timeout=50) == ["KeyboardInterrupt", ""]
