"""Averages of shards that are thrown away: a handle says so once, as under DDP."""

import warnings

import pytest
import torch

import gradwire

from ..test_thrown_away import ENDS, STEPS, counted
from .given import given_model, gradients


def warned(rank, world_size, end, reduce, stepped):
    """How many warnings some steps bring; an optimizer of torch steps in those of `stepped`, beside the end."""
    model = given_model(world_size)
    handle = gradwire.attach(model, gather="none", reduce=reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            model(gradients(rank, step)).backward()
            if step in stepped:
                optimizer.step()
            ENDS[end][0](model, handle)
    handle.close()
    return counted(caught)


@pytest.mark.parametrize("stepped", [(0,), (STEPS - 1,)], ids=["a step before", "a step after"])
@pytest.mark.parametrize("end", ENDS)
def test_gradients_that_are_cleared_with_no_optimizer_step_are_noticed_once(ranks, end, stepped):
    assert ranks.run(warned, 2, end, "int4:error_feedback=1", stepped) == [int(ENDS[end][1])] * 2


def test_without_error_feedback_nothing_comes_back_and_nothing_is_said(ranks):
    assert ranks.run(warned, 2, "cleared", "int8", (0,)) == [0, 0]
