"""A model with a handle on it is copied and pickled like any other: for averaged weights, or a whole-model checkpoint."""

import copy
import io

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import gradwire
from gradwire.hooks.torch_ddp import compress_bucket

from .given import gradients, same, wrapped

SHAPES = ((40, 30), (40,))


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": pickled, "AveragedModel": lambda model: AveragedModel(model).module}


def copied(rank, world_size, way):
    """Whether the copy's handle holds what the first one holds, and is another one."""
    ddp = wrapped(SHAPES, find_unused_parameters=False)
    handle = gradwire.attach(ddp, "topk:ratio=0.1")
    for step in range(2):
        ddp(gradients(rank, step, SHAPES)).backward()
        ddp.zero_grad()
    ((_, twin),) = WAYS[way](ddp)._comm_hooks
    alike = same(handle.state_dict(), twin.state_dict())
    ddp(gradients(rank, 2, SHAPES)).backward()
    apart = not same(handle.state_dict(), twin.state_dict())
    handle.close()
    return alike, apart


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_has_a_handle_of_its_own_in_the_same_state(ranks, way):
    assert ranks.run(copied, 2, way) == [(True, True)] * 2


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
