"""What goes wrong is an error on every rank, says what it hit, and never hangs."""

import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.compress import Layout, all_reduce
from gradwire.compress.state.tree import Counter
from gradwire.ddp_core.transport.torch_groups import store_of
from gradwire.hooks.torch_ddp import compress_bucket

from .given import average, gradients, wrapped

SHAPES = ((40, 30), (40,), (50, 40))
LONG = timedelta(seconds=60)


def attached(spec, timeout):
    """Two buckets; without find_unused_parameters DDP itself sends nothing once it has rebuilt them."""
    ddp = wrapped(SHAPES, bucket_cap_mb=0.002, find_unused_parameters=False)
    return ddp, gradwire.attach(ddp, spec, timeout=timeout)


def error_of(function, *args):
    """The type and the message of what a call raised, and the seconds it took."""
    began, kind, message = time.monotonic(), "", ""
    try:
        function(*args)
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    return kind, message, time.monotonic() - began


def error_in_step_two(rank, ddp):
    for step in range(2):
        average(ddp, gradients(rank, step, SHAPES))
    error = error_of(average, ddp, gradients(rank, 2, SHAPES))
    store_of(dist.group.WORLD).set(f"rank {rank} raised", "")
    return error


def in_step_two(act):
    """Does nothing in the steps before it."""
    steps = iter((lambda: None, lambda: None, act))
    return lambda *_: next(steps)()


def wait_for_the_error_of(rank):
    store_of(dist.group.WORLD).wait([f"rank {rank} raised"], LONG)


@dataclass
class Place:
    layout: Layout
    step: Counter


@dataclass(frozen=True)
class Breaks:
    """Breaks on rank 1 in step 2 in the bucket of a parameter, before its first round or after its last."""

    late: bool
    where: str = "p2"

    def init(self, layout):
        return Place(layout, Counter())

    def reduce(self, grad, state, residual=None):
        bad = state.layout.ranks.rank == 1 and self.where in state.layout.names and state.step.value == 2
        if bad and not self.late:
            raise ArithmeticError("broken on purpose")
        yield from all_reduce(grad)
        if bad:
            raise ArithmeticError("broken on purpose")
        return grad


def breaks(rank, world_size, late, waits, where="p2"):
    ddp, handle = attached(Breaks(late, where), LONG)
    if rank == 0 and waits:
        wait = in_step_two(lambda: wait_for_the_error_of(1))
        ddp.module.p0.register_hook(lambda _: wait())  # holds up its second bucket
    error = error_in_step_two(rank, ddp)
    anew = wrapped(SHAPES, find_unused_parameters=False)
    anew.register_comm_hook(handle, compress_bucket)
    return error, error_of(average, anew, gradients(rank, 3, SHAPES))


@pytest.mark.parametrize("late", [False, True])
def test_a_program_that_raises_reaches_backward_with_its_parameters_and_the_engine_stays_failed(ranks, late):
    healthy, (broken, again) = ranks.run(breaks, 2, late, False)
    assert "(parameters p2" in broken[1]
    assert "has failed" in again[1]
    for kind, message, _ in (broken, again):
        assert kind == "RuntimeError"
        assert "ArithmeticError: broken on purpose" in message
    assert healthy[1][0] == "RuntimeError"  # in the step before it may have had all it needs
    assert all(seconds < LONG.total_seconds() / 2 for _, _, seconds in (*healthy, broken, again))


def test_what_torch_puts_around_an_error_is_explained_and_the_error_has_a_line_of_its_own(ranks):
    last_bucket = "p0"  # behind it none raises by itself
    _, ((_, message, _), _) = ranks.run(breaks, 2, True, False, last_bucket)
    around, error = message.splitlines()[:2]
    assert "no type is wrong" in around
    assert error.startswith("bucket ")
    assert error.endswith("ArithmeticError: broken on purpose")


def test_the_error_of_a_program_waits_for_no_other_rank(ranks):
    _, (broken, _) = ranks.run(breaks, 2, True, True)
    assert "broken on purpose" in broken[1]
    assert broken[2] < LONG.total_seconds() / 2  # else the other one would have waited longer


def reduce_sparse(rank, world_size):
    ddp = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    gradwire.attach(ddp, "topk")
    return error_of(ddp(torch.tensor([1, 2])).sum().backward)


def test_sparse_gradients_are_refused_with_the_way_out(ranks):
    for kind, message, _ in ranks.run(reduce_sparse, 2):
        assert kind == "TypeError"
        assert "sparse=False" in message


def reduce_after_close(rank, world_size):
    ddp, handle = attached("onebit", LONG)
    average(ddp, gradients(rank, 0, SHAPES))
    handle.close()
    return error_of(average, ddp, gradients(rank, 1, SHAPES))


def test_a_closed_hook_says_so_instead_of_waiting_for_ever(ranks):
    for kind, message, seconds in ranks.run(reduce_after_close, 2):
        assert kind == "RuntimeError"
        assert "close() was called" in message
        assert seconds < LONG.total_seconds() / 2


def close_late(rank, world_size, store):
    ddp, handle = attached("onebit", LONG)
    average(ddp, gradients(rank, 0, SHAPES))
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    return error_of(handle.close)


def test_closing_after_all_groups_were_destroyed_and_made_anew_is_no_error(ranks, tmp_path):
    assert [kind for kind, _, _ in ranks.run(close_late, 2, str(tmp_path / "store"))] == ["", ""]
