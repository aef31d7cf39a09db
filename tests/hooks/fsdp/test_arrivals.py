"""Reentrant checkpoints begin backwards inside of a backward: a step begins and ends with the outermost one.

Weights that are held are read behind their gathers.
"""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.ddp_core import Engine
from gradwire.ddp_core.averaging.shard_averager import ShardAverager

from .given import mesh_of, network, trained


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


def followed(rank, world_size):
    """If each output that backward fills again was filled before gathers were followed; what was lent to each program."""
    again, submit, outputs, filled, lent = ShardAverager.gather_again, Engine.submit, [], [], []

    def noted(averager, names, rows, out):
        outputs.append(out.zero_())
        again(averager, names, rows, out)

    def follows(engine):
        filled.append(bool(outputs[-1].any()))

    def submitted(engine, task, **way):
        lent.append((way["gathers"], task.lent))
        return submit(engine, task, **way)

    model = network(world_size)
    handle = gradwire.attach(model, gather="int4", reduce="int4")
    with (
        mock.patch.object(ShardAverager, "gather_again", noted),
        mock.patch.object(Engine, "follow_gathers", follows),
        mock.patch.object(Engine, "submit", submitted),
    ):
        trained(model, rank, 1)
    handle.close()
    return filled, [bool(out.any()) for out in outputs], sorted(lent)


def test_backward_reads_weights_behind_their_gathers_and_all_results_are_lent(ranks):
    """On a GPU other streams may have written them, and torch frees the memory of outputs itself."""
    for filled, in_the_end, lent in ranks.run(followed, 2):
        assert (filled, in_the_end) == ([False] * 2, [True] * 2)
        assert lent == [(False, True)] * 3 + [(True, True)] * 3
