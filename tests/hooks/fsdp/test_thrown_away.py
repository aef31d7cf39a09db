"""Averages of shards and of replicas that are thrown away: a handle says so once, as under DDP."""

import warnings

import pytest
import torch

from ...torch_versions import fsdp_of_others
from ..laws.wrappers import EVERY, compressed_hybrid, over
from ..test_thrown_away import ENDS, STEPS, counted
from .given import GivenParts, gradients


def warned(rank, world_size, wrapper, end, spec, stepped):
    """How many warnings some steps bring; an optimizer of torch steps in that of `stepped`, beside the end."""
    model, handle = EVERY[wrapper].made(GivenParts(), spec, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            model(gradients(rank, step)).backward()
            if step == stepped:
                optimizer.step()
            ENDS[end][0](model, handle)
    handle.close()
    return counted(caught)


def at_each_end(rank, world_size, wrapper):
    """{(end, when an optimizer steps): the number of warnings} with residuals, and that of warnings without any."""
    spec = EVERY[wrapper].specs[-1]
    cases = [(end, at) for end, (_, noticed) in ENDS.items() for at in ((0, STEPS - 1) if noticed else (0,))]
    found = {(end, at): warned(rank, world_size, wrapper, end, spec, at) for end, at in cases}
    return found, warned(rank, world_size, wrapper, "cleared", "int8", 0)


@over("FSDP2", "replicas", "HSDP", "HSDP by torch", "replicate")
def test_gradients_that_are_cleared_with_no_optimizer_step_are_noticed_once(ranks, wrapper):
    for found, without in ranks.run(at_each_end, EVERY[wrapper].world_size, wrapper, timeout=120):
        assert found == {(end, at): int(ENDS[end][1]) for end, at in found}
        assert without == (wrapper == "HSDP")  # whose shards hold back in any case


def warned_after_swap(rank, world_size, first, second, at):
    """How many warnings hybrid sharding brings whose `reduce` is swapped before a step. Its replicas hold back, too."""
    model, handle = compressed_hybrid(GivenParts(), "topk:ratio=0.1", {"reduce": first})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2 * STEPS):
            if step == at:
                handle.swap(reduce=second)
            model(gradients(rank, step)).backward()
            if step % STEPS == 0:
                optimizer.step()
            model.zero_grad()
    handle.close()
    return counted(caught)


@fsdp_of_others
@pytest.mark.parametrize("at", [0, 1, STEPS])
@pytest.mark.parametrize(("first", "second"), [("int4", "none"), ("none", "int4")])
def test_who_notices_them_follows_a_swap(ranks, first, second, at):
    assert ranks.run(warned_after_swap, 4, first, second, at, timeout=120) == [1] * 4
