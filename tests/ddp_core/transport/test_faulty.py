"""Injected failures: where they strike, and that training ends with an error on every rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire

from ...faulty import Fault, faulty
from ..errors import shorten

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=1)
STEPS = 3


def steps_and_error(rank, world_size, spec, fault):
    """How many steps came to their end, and what the next one raised."""
    model = gradwire.DistributedDataParallel(nn.Linear(8, 8), compressor=spec, timeout=LONG, transport=faulty(fault))
    done, message = 0, ""
    try:
        for _ in range(STEPS):
            model(torch.ones(2, 8)).sum().backward()
            done += 1
            if fault.kind != "call":
                shorten(model.compression, SHORT, model.reducer)
    except RuntimeError as error:
        message = str(error)
    dist.barrier()
    model.compression.close()
    return done, message


@pytest.mark.parametrize("spec", ["none", "powersgd:rank=1"])
@pytest.mark.parametrize("kind", ["raise", "break", "hang", "drop"])
def test_a_fault_in_the_second_step_ends_training_on_all_ranks_in_that_step(ranks, spec, kind):
    fault = Fault(kind, rank=1, turn=1)
    (done, message), (faulty_done, faulty_message) = ranks.run(steps_and_error, 2, spec, fault)
    assert faulty_done == 1
    assert "made to" in faulty_message
    assert "bucket 0 (parameters" in faulty_message
    assert done <= 2  # it may have all that it needs of the second
    assert "bucket 0 (parameters" in message or done == 2


def test_a_fault_may_only_call(ranks):
    fault = Fault("call", rank=0, action=note)
    assert ranks.run(steps_and_error, 2, "none", fault) == [(STEPS, "")] * 2


def note():
    """Whatever a test wants."""
