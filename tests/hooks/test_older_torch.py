"""On a torch which has neither the newer `replicate`, of 2.10, nor FSDP2 with communication of others, of 2.9."""

import sys

import pytest
import torch
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradwire

from ..ddp_core.errors import message_of
from .replicate.conftest import WHERE
from .replicate.given import bare, trained


def older():
    """A newer torch as well, without what it has more."""
    patch = pytest.MonkeyPatch()
    patch.setitem(sys.modules, WHERE, None)  # imports of it fail
    patch.delattr(FSDPModule, "set_custom_reduce_scatter", raising=False)
    return patch


def replicated():
    return replicate_by_ddp(bare())


def sharded():
    return fully_shard(bare(), mesh=init_device_mesh("cpu", (2,)))


def refused(rank, world_size):
    patch = older()
    try:
        return message_of(gradwire.attach, replicated(), "int8"), message_of(gradwire.attach, sharded(), reduce="int8")
    finally:
        patch.undo()


def test_what_needs_a_newer_torch_is_refused_with_what_to_do(ranks):
    for of_replicate, of_fsdp2 in ranks.run(refused, 2):
        assert of_replicate.startswith("TypeError")
        assert "register_comm_hook(None, gradwire.comm_hooks.int8)" in of_replicate
        assert "from torch 2.10 on" in of_replicate
        assert of_fsdp2.startswith("RuntimeError")
        assert f"since torch 2.9, this is {torch.__version__}" in of_fsdp2


def by_the_hook(rank, world_size):
    """Parameters after a training by the older `replicate`, without and with the hook that its refusal recommends."""
    patch, answers = older(), []
    try:
        for ours in (False, True):
            model = replicated()
            if ours:
                model.register_comm_hook(None, gradwire.comm_hooks.none)
            answers.append(trained(model, rank))
            if ours:
                assert gradwire.handle_of(model).called
                gradwire.handle_of(model).close()
    finally:
        patch.undo()
    return answers


def test_the_older_replicate_takes_the_hook_that_its_refusal_recommends(ranks):
    for theirs, ours in ranks.run(by_the_hook, 2):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
