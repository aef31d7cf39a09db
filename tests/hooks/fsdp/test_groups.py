"""Groups of parameters whose weights travel uncompressed, and say so: of several types, and of 8 bits."""

import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradwire

from .given import mesh_of


class Mixed(nn.Module):
    """Parameters of two types in one group, which torch takes if those of one type are frozen."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 6), nn.Linear(6, 6).bfloat16().requires_grad_(False)

    def forward(self, inputs):
        return self.narrow(self.wide(inputs).bfloat16()).float()


def computed(rank, world_size, spec):
    """Outputs of a group of several types by torch and by gradwire, and warnings of two forwards."""
    answers, lines = [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("gradwire").addHandler(handler)
    for ours in (False, True):
        torch.manual_seed(0)
        model = fully_shard(Mixed(), mesh=mesh_of(world_size))
        handle = gradwire.attach(model, gather=spec) if ours else None
        with torch.no_grad():
            answers += [model(torch.ones(2, 6)) for _ in range(2)][:1]
            model.reshard()
            model(torch.ones(2, 6))
    handle.close()
    logging.getLogger("gradwire").removeHandler(handler)
    return *answers, [line for line in lines if "uncompressed" in line]


@pytest.mark.parametrize("spec", ["int8", "int4"])
def test_a_group_of_several_types_travels_uncompressed_and_is_named_once(ranks, spec):
    for rank, (theirs, ours, lines) in enumerate(ranks.run(computed, 2, spec)):
        assert torch.equal(theirs, ours)
        assert len(lines) == (1 if rank == 0 else 0)
        assert all("narrow.weight" in line or "wide.weight" in line for line in lines)
