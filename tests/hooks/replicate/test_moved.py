"""A checkpoint of torch.distributed.checkpoint that moves from `fully_shard` to `replicate` and back."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire

from .given import bare, inputs, replicate, step_of

LINES = {replicate: {"compressor": "int8"}, fully_shard: {"gather": "int8", "reduce": "int8"}}


def wrapped(wrap, world_size):
    model, mesh = bare(), init_device_mesh("cpu", (world_size,))
    for part in ("0", "2", ""):
        wrap(model.get_submodule(part), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    gradwire.attach(model, **LINES[wrap], optimizer=optimizer)
    return model, optimizer


def whole(model, optimizer):
    """{name: numbers} of all ranks, of parameters and of Adam's moments."""
    found = {name: each.full_tensor() for name, each in model.named_parameters()}
    for name, each in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{moment}"] = optimizer.state[each][moment].full_tensor()
    return {name: each.detach().clone() for name, each in found.items()}


def moved(rank, world_size, wraps, folder):
    before, after = (wrapped(wrap, world_size) for wrap in wraps)
    for step in range(3):
        step_of(*before, inputs(rank, step))
    saved, loaded = get_state_dict(*before), get_state_dict(*after)
    dcp.save(dict(zip(("model", "optimizer"), saved, strict=True)), checkpoint_id=folder)
    dcp.load(dict(zip(("model", "optimizer"), loaded, strict=True)), checkpoint_id=folder)
    set_state_dict(*after, model_state_dict=loaded[0], optim_state_dict=loaded[1])
    found = whole(*before), whole(*after)
    step_of(*after, inputs(rank, 3))  # it trains on
    return found


@pytest.mark.parametrize("wraps", [(fully_shard, replicate), (replicate, fully_shard)], ids=["to", "back"])
def test_weights_and_moments_move_to_the_bit(ranks, wraps, tmp_path):
    for before, after in ranks.run(moved, 2, wraps, str(tmp_path)):
        assert len(before) == 3 * 6
        for name, values in before.items():
            assert torch.equal(values, after[name]), name
