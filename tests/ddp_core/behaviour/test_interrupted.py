"""A state that is saved after a backward that did not come to its end is the one before it."""

import copy
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ...ranks import GROUP_TIMEOUT
from ..chain import inputs_of, wrapped
from ..nets import same


def backward(model, rank, step):
    model(inputs_of(rank, step)).square().sum().backward()
    model.zero_grad()


def fail(gradient):
    raise KeyboardInterrupt


def numbers_of(state):
    entries = state["parameters"]
    return [entries[name][field] for name in sorted(entries) for field in sorted(entries[name])]


def one_rank_stays_away(rank, world_size):
    """Whether a save is the state before, where the other rank's buckets do not come."""
    model = wrapped("topk:ratio=0.1", bucket_cap_mb=1e-6)
    for step in range(2):
        backward(model, rank, step)
    before = after = copy.deepcopy(model.compression.state_dict())
    if rank == 0:
        model.module.layers[3].weight.register_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            backward(model, rank, 2)
        after = model.compression.state_dict()
    dist.barrier()
    model.compression.close()
    return before["step"] == after["step"] and same(numbers_of(before), numbers_of(after))


def test_buckets_that_never_come_are_not_waited_for(ranks):
    assert ranks.run(one_rank_stays_away, 2) == [True, True]


def waited_for_in_vain(rank, world_size, spec):
    """Seconds until Ctrl-C ends a wait for a rank that does not come, and the steps that are saved."""
    model = wrapped(spec, bucket_cap_mb=1e-6)
    for step in range(3):
        backward(model, rank, step)  # in the second they agree on an order of buckets
    seconds = 0.0
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  a busy machine may raise it before backward begins
            interrupt.start()
            backward(model, rank, 3)
        seconds = time.monotonic() - began
    saved = model.compression.state_dict()["step"]
    dist.barrier()
    model.compression.averager.engines.of(torch.device("cpu"), 0).transport.abort()
    model.compression.close()
    return seconds, saved


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1", "powersgd:rank=2"])
def test_ctrl_c_ends_a_wait_for_a_rank_that_does_not_come(ranks, spec):
    (seconds, saved), _ = ranks.run(waited_for_in_vain, 2, spec)
    assert seconds < GROUP_TIMEOUT.total_seconds() * 0.9
    assert saved == 3
