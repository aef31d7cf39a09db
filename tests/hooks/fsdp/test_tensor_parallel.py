"""FSDP2 with tensor parallelism: each rank's state has a key that no other rank has, and comes back to it alone."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradwire
from gradwire.hooks.fsdp.state import merged

WAYS = {"gather": "int4", "reduce": "int4"}


def attached(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, gradwire.attach(model, **WAYS)


def trained(model, place, first, last):
    """The losses of steps."""
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, last):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * place + step))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resumed(rank, world_size, axes, folder):
    """The key of a state, losses after a save, and the same after it was loaded into another model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    place = mesh.get_local_rank("dp")
    (model, handle), (other, again) = attached(mesh), attached(mesh)
    trained(model, place, 0, 3)
    state = handle.state_dict()
    dcp.save({"compression": state, "model": model.state_dict()}, checkpoint_id=folder)
    losses = trained(model, place, 3, 6)
    saved = {"compression": again.state_dict(), "model": other.state_dict()}
    dcp.load(saved, checkpoint_id=folder)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["compression"])
    told = {key: told_of(again, key, state) for key in ("rank 0 of 2", "rank 0 of 2, part 0 of 2")}
    answer = list(state), losses, trained(other, place, 3, 6), told
    handle.close()
    again.close()
    return answer


def told_of(handle, key, state):
    """What a load of a state under another key raises, if it does."""
    try:
        handle.load_state_dict({key: next(iter(state.values()))})
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp")])
def test_a_checkpoint_of_all_ranks_gives_each_its_own_state_back(ranks, axes, tmp_path):
    answers = ranks.run(resumed, 4, axes, str(tmp_path))
    assert len({key for keys, *_ in answers for key in keys}) == 4
    for (key,), losses, again, told in answers:
        assert again == losses
        assert [text == "accepted" for text in told.values()] == [False, key == "rank 0 of 2, part 0 of 2"]
        assert "load each rank's own" in told["rank 0 of 2"]


def saved(rank, ranks, part, number):
    """A state that holds back one number."""
    inside = {"reduce": "int4", "step": 1, "parameters": {"w": {"residual": torch.tensor([number])}}}
    return {f"rank {rank} of {ranks}{part}": inside}


def test_on_another_number_of_ranks_each_part_takes_the_mean_of_its_own_states():
    parts = [f", part {part} of 2" for part in range(2)]
    states = [saved(rank, 3, part, 10.0 * place + rank) for place, part in enumerate(parts) for rank in range(3)]
    for place, part in enumerate(parts):
        found = merged(states, part.removeprefix(", "))
        assert found["parameters"]["w"]["residual"].tolist() == [10.0 * place + 1]
    for wrong, part in ((states, ""), (states[1:], "part 0 of 2"), ([*states, states[0]], "part 0 of 2")):
        with pytest.raises(ValueError, match="each of them once"):
            merged(wrong, part)
