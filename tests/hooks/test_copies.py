"""A model with a handle on it is copied and pickled like any other: for averaged weights, or a whole-model checkpoint."""

import copy

import torch

import gradwire
from gradwire.hooks.torch_ddp import compress_bucket

from .given import gradients, same, wrapped

SHAPES = ((40, 30), (40,))


def test_a_copied_handle_goes_on_with_the_copied_parameters(ranks):
    assert all(ranks.run(gone_on, 2))


def gone_on(rank, world_size):
    """Whether a new model that takes a copied handle averages in the bits of the first."""
    ddp = wrapped(SHAPES, find_unused_parameters=False)
    handle = gradwire.attach(ddp, "topk:ratio=0.1")
    for step in range(2):
        ddp(gradients(rank, step, SHAPES)).backward()
        ddp.zero_grad()
    twin, module = copy.deepcopy((handle, ddp.module))
    again = torch.nn.parallel.DistributedDataParallel(module)
    again.register_comm_hook(twin, compress_bucket)
    for model in (ddp, again):
        model(gradients(rank, 2, SHAPES)).backward()
    mine = [parameter.grad for parameter in again.parameters()]
    handle.close()
    twin.close()
    return same(mine, [parameter.grad for parameter in ddp.parameters()])
