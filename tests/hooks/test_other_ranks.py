"""Training that goes on with more ranks or fewer: nothing held back is lost, and a rank that fell behind is named."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import SHAPES, Given, average, gradients


def one_behind(rank, world_size, spec, ours, late):
    """A first step after rank `late` did not load the parameters that the others did."""
    if ours:
        model = gradwire.DistributedDataParallel(Given(SHAPES), compressor=spec)
    else:
        model = TorchDDP(Given(SHAPES))
        gradwire.attach(model, spec)
    if rank != late:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
    average(model, gradients(rank, 0, SHAPES))


@pytest.mark.parametrize(("spec", "ours"), [("none", True), ("topk", False)])
def test_a_new_rank_that_loaded_nothing_is_named_at_the_first_step(ranks, spec, ours):
    for failure in ranks.run(one_behind, 3, spec, ours, 2, expect_errors=True):
        assert "rank 2 has" in failure.message
        assert "load the same checkpoint" in failure.message
