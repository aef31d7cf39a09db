"""Reentrant checkpoints begin backwards inside of a backward: a step begins and ends with the outermost one."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import gradwire

from .given import mesh_of


class Checkpointed(nn.Module):
    """Three modules, of which the middle one is computed anew in backward, or all are `everywhere`."""

    def __init__(self, *, everywhere):
        super().__init__()
        torch.manual_seed(0)
        self.everywhere = everywhere
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, inputs):
        if not self.everywhere:
            return self.last(checkpoint(self.middle, self.first(inputs).tanh(), use_reentrant=True).tanh())
        numbers = inputs.requires_grad_()
        for part in (self.first, self.middle, self.last):
            numbers = checkpoint(part, numbers, use_reentrant=True).tanh()
        return numbers


def totals(rank, world_size, reduce, everywhere):
    """The sums of some steps' averages; what is held back after them; the number of steps."""
    model, mesh, steps = Checkpointed(everywhere=everywhere), mesh_of(world_size), 3
    for part in (model.first, model.middle, model.last, model):
        fully_shard(part, mesh=mesh)
    handle = gradwire.attach(model, reduce=reduce)
    for step in range(steps):  # gradients add up
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * rank + step))
        model(inputs).square().mean().backward()
    (state,) = handle.state_dict().values()
    held = {name: fields["residual"] for name, fields in state["parameters"].items() if fields}
    handle.close()
    return {name: each.grad.full_tensor() for name, each in model.named_parameters()}, held, state["step"]


@pytest.mark.parametrize("everywhere", [False, True])
def test_with_reentrant_checkpoints_no_part_of_a_gradient_is_lost(ranks, everywhere):
    exact = ranks.run(totals, 2, "none", everywhere)[0][0]
    answers = ranks.run(totals, 2, "int4", everywhere)
    for sums, _, steps in answers:
        assert steps == 3
        for name, each in sums.items():
            held = sum(theirs[name] for _, theirs, _ in answers) / 2
            torch.testing.assert_close(each + held, exact[name], rtol=0, atol=1e-6)
