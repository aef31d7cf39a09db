"""Tensor parallelism inside a replicated model: each rank's part is averaged over the data-parallel ranks alone."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradwire

from .given import local, network, trained

PARTS = (
    "up.weight",
    "up.bias",
    "down.weight",
)  # each rank of tensor parallelism has a part of these, and the rest whole


class Block(nn.Module):
    """As of a Llama: a norm, and two matrices of which each rank has a part."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(7), nn.Linear(7, 36)
        self.scale = nn.Parameter(torch.ones(7))
        self.down = nn.Linear(36, 7, bias=False)

    def forward(self, batch):
        return batch + self.down(self.up(self.norm(batch) * local(self.scale)).relu())


def blocks(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        block.scale = nn.Parameter(distribute_tensor(block.scale.detach(), mesh["tp"], [Replicate()]))
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return network(model, ("0", "1", ""), mesh=mesh["dp"])


def in_own_ddp(rank, world_size):
    """What gradwire's DDP says of a tensor-parallel model without the axis of its mesh."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Block(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(TypeError) as raised:
        gradwire.DistributedDataParallel(model, compressor="int8")
    taken = gradwire.DistributedDataParallel(model, compressor="int8", device_mesh=mesh["dp"])
    taken.compression.close()
    return str(raised.value)


def test_ddp_refuses_parameters_in_parts_unless_it_is_given_the_axis(ranks):
    for text in ranks.run(in_own_ddp, 2):
        assert "3 parameters (up.weight, up.bias, down.weight, ...) are DTensors" in text
        assert "device_mesh=mesh['dp']" in text


SPECS = {"none": 0, "int2": 0.05, "powersgd:rank=1": 0.05, "topk:ratio=0.2": 0.05}  # and their tolerances


def all_of_them(rank, world_size):
    """By torch's averages and by ours: parameters, after steps whose batches are those of a place in data parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = mesh.get_coordinate()[0]
    theirs, ours = trained(blocks(mesh), place, 3), {}
    for spec in SPECS:
        model = blocks(mesh)
        handle = gradwire.attach(model, spec)
        ours[spec] = trained(model, place, 3)
        state = handle.state_dict()
        handle.close()
    return theirs, ours, state["parameters"]["0.up.weight"]["residual"].shape


def test_each_part_is_averaged_and_what_is_whole_stays_alike_on_all_ranks(ranks):
    answers = ranks.run(all_of_them, 4)
    for theirs, ours, shape in answers:
        assert shape == (18, 7)
        for spec, tolerance in SPECS.items():
            torch.testing.assert_close(ours[spec], theirs, rtol=tolerance, atol=tolerance)
            for name, numbers in ours[spec].items():
                assert name.endswith(PARTS) or torch.equal(numbers, answers[0][1][spec][name])
    for (_, one, _), (_, other, _) in zip(answers[:2], answers[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)  # of data parallelism
