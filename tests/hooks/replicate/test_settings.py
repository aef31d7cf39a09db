"""What `replicate` can be set to, trained as without gradwire; and what is refused, with what to do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire

from ...ddp_core.errors import message_of
from .given import bare, gradients, inputs, network, trained


def refused(rank, world_size, make, arguments):
    return message_of(gradwire.attach, make(), **arguments)


def mixed():
    model, mesh = bare(), init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    fully_shard(model[0], mesh=mesh)
    return network(model, ("2", "3"))


def on_two_meshes():
    model = network(parts=("0",))
    return network(model, ("2",), mesh=DeviceMesh.from_group(dist.new_group([0, 1]), "cpu", mesh_dim_names=("ranks",)))


def attached():
    model = network()
    gradwire.attach(model, "int8")
    return model


MIXED = "modules of fully_shard (0) and of replicate (2, 3): attach to each part"
APART = "on different process groups: attach to each"
REFUSED = {  # name: the model, what attach is given, the error, words of its message
    "no compressor": (network, {}, "TypeError", "takes a compressor"),
    "options of shards": (network, {"compressor": "int8", "gather": "int8"}, "TypeError", "a replicated model"),
    "sharded modules": (mixed, {"compressor": "int8"}, "ValueError", MIXED),
    "sharded modules, by options of shards": (mixed, {"gather": "int8", "reduce": "int8"}, "ValueError", MIXED),
    "a second handle": (attached, {"compressor": "int8"}, "ValueError", "close() the handle first"),
    "modules on two meshes": (on_two_meshes, {"compressor": "int8"}, "ValueError", APART),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_do(ranks, case):
    make, arguments, error, words = REFUSED[case]
    for answer in ranks.run(refused, 2, make, arguments):
        assert answer.startswith(error)
        assert words in answer


def by_parts(rank, world_size):
    """Parameters after a training of a model with sharded and replicated modules, by torch and by a handle for each part."""
    answers = []
    for ours in (False, True):
        model = mixed()
        handles = [gradwire.attach(model[0], gather="none", reduce="none")] if ours else []
        handles += [gradwire.attach(model[place], "none") for place in (2, 3)] if ours else []
        answers.append(trained(model, rank))
        for handle in handles:
            handle.close()
    return answers


def test_sharded_and_replicated_parts_each_with_a_handle_train_as_torch_does(ranks):
    for theirs, ours in ranks.run(by_parts, 2):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


class OneOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, batch):
        return self.a(batch)


def partly_used(rank, world_size, told):
    """The error, or gradients, of a backward that leaves parameters of a module out."""
    model = network(OneOfTwo(), ("",))
    if told:
        model.set_reduce_scatter_unused_params(True)
    handle = gradwire.attach(model, "powersgd:rank=1")
    error = message_of(model(inputs(rank, 0)).sum().backward)
    handle.close()
    return error or gradients(model)


def test_a_module_of_which_a_part_is_left_out_is_refused_unless_torch_fills_in_zeros(ranks):
    assert all("set_reduce_scatter_unused_params(True)" in answer for answer in ranks.run(partly_used, 2, told=False))
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        return
    for found in ranks.run(partly_used, 2, told=True):
        assert found["a.weight"].any()
        assert not found["b.weight"].any()
