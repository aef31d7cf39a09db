"""Training that goes on with more ranks or fewer: nothing held back is lost, and a rank that fell behind is named."""

import pytest
import torch

from .given import SHAPES, Given, average, compressed, gradients


def one_behind(rank, world_size, spec, kind):
    """A first step after the last rank did not load the parameters that the others did."""
    model, _ = compressed(kind, Given(SHAPES), spec)
    if rank < world_size - 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
    average(model, gradients(rank, 0, SHAPES))


@pytest.mark.parametrize(("spec", "kind"), [("none", "own"), ("topk", "attached")])
def test_a_new_rank_that_loaded_nothing_is_named_at_the_first_step(ranks, spec, kind):
    for failure in ranks.run(one_behind, 3, spec, kind, expect_errors=True):
        assert "rank 2 has" in failure.message
        assert "load the same checkpoint" in failure.message
