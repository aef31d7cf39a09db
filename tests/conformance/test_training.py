"""Ways to train: what a step gives is what it gives on torch's DDP."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwire

from .both import Blocks, assert_all_same, assert_same, batches, mlp, seeded, train


def checkpointed(rank, world_size, ddp, case):
    reentrant, options = case
    net = seeded(Blocks)
    plain = net.layers[1].forward
    net.layers[1].forward = lambda x: checkpoint(plain, x, use_reentrant=reentrant)
    return train(ddp(net, **options), batches(rank, 3, 4, 8))


def test_checkpointed_layers(ranks):
    cases = [(reentrant, options) for reentrant in (False, True) for options in ({}, {"static_graph": True})]
    assert_all_same(ranks, checkpointed, cases)


def accumulating(rank, world_size, ddp, options):
    model = ddp(seeded(mlp), **options)
    seen = []
    for step, each in enumerate(batches(rank, 6, 3, 8)):
        if step % 3 != 2:
            with model.no_sync():
                model(each).sum().backward()
        else:
            model(each).sum().backward()
        seen.append([parameter.grad.clone() for parameter in model.parameters()])
        if step == 2:
            model.zero_grad()
    return seen


def test_accumulation(ranks):
    assert_all_same(ranks, accumulating, [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])


def accumulating_twice(rank, world_size):
    ddp = gradwire.DistributedDataParallel
    return [accumulating(rank, world_size, ddp, {"static_graph": static}) for static in (False, True)]


def test_a_static_graph_may_accumulate_from_the_first_step(ranks):  # torch's reducer fails on an assertion of its own
    for plain, static in ranks.run(accumulating_twice, 2):
        torch.testing.assert_close(plain, static, rtol=0, atol=0)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1 + x.sum().detach()
        return self.layer(x)


def buffered(rank, world_size, ddp):
    model = ddp(seeded(Counting))
    seen = []
    for step, each in enumerate(batches(rank, 5, 2, 4)):
        with torch.set_grad_enabled(step != 2):
            out = model(each)
        if step != 2:
            out.sum().backward()
        seen.append((model.module.count.clone(), model.will_sync_module_buffers()))
    return seen


def test_buffers(ranks):
    assert_same(ranks, buffered)


def detached(rank, world_size, ddp):
    model = ddp(seeded(mlp))
    model._remove_autograd_hooks()
    model(batches(rank, 1, 3, 8)[0]).sum().backward()
    model._check_reducer_finalized()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_without_its_hooks_a_model_averages_nothing(ranks):
    first, second = assert_same(ranks, detached)
    assert not first[0].equal(second[0])


def graph_warning(rank, world_size):
    model = gradwire.DistributedDataParallel(seeded(mlp))
    loss = model(batches(rank, 1, 3, 8)[0]).square().mean()
    with pytest.warns(UserWarning, match="create_graph=True"):
        loss.backward(create_graph=True)


def test_create_graph_is_warned_of(ranks):
    ranks.run(graph_warning, 1)
