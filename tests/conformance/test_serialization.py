"""State dicts, pickles and copies go where those of torch's DDP go."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as checkpoint
from torch import nn

import gradwire

from .both import KINDS, assert_same, batches, both, error_of, mlp, seeded, train


def keys(rank, world_size, ddp):
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    return list(ddp(net).state_dict())


def test_the_keys_are_torchs(ranks):
    theirs, ours = both(ranks, keys)
    assert ours == theirs
    assert ours[0][0] == "module.0.weight"


def crossing(rank, world_size, source, target):
    first = KINDS[source](seeded(mlp, 1))
    train(first, batches(rank, 2, 3, 8))
    second = KINDS[target](seeded(mlp, 2))
    second.load_state_dict(first.state_dict())
    inputs = batches(rank, 2, 3, 8, seed=5)
    return train(first, inputs), train(second, inputs)


@pytest.mark.parametrize(("source", "target"), [("torch", "gradwire"), ("gradwire", "torch")])
def test_one_loads_what_the_other_saved_and_goes_on_alike(ranks, source, target):
    for first, second in ranks.run(crossing, 2, source, target):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def through_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
    "torch.save": through_torch,
}


def copied(rank, world_size, cases):
    return [_copied(rank, *case) for case in cases]


def _copied(rank, way, spec, options):
    model = gradwire.DistributedDataParallel(seeded(mlp), compressor=spec, **options)
    train(model, batches(rank, 3, 3, 8))
    twin = COPIES[way](model)
    inputs = batches(rank, 3, 3, 8, seed=5)
    return train(model, inputs), train(twin, inputs), twin.static_graph == model.static_graph


def test_a_copy_trains_on_as_the_original(ranks):
    cases = [(way, spec, {}) for way in COPIES for spec in ("none", "powersgd:rank=2")]
    for answers in ranks.run(copied, 2, [*cases, ("pickle", "none", {"static_graph": True})]):
        for model, twin, alike in answers:
            torch.testing.assert_close(model, twin, rtol=0, atol=0)
            assert alike


def of_rank_0(rank, world_size, ddp):
    """What a model does on both ranks that rank 0 has saved."""
    model = ddp(seeded(mlp))
    train(model, batches(rank, 2, 3, 8))
    pickled = [pickle.dumps(model)]
    dist.broadcast_object_list(pickled)
    return train(pickle.loads(pickled[0]), batches(rank, 2, 3, 8, seed=5))


def test_a_pickle_of_one_rank_is_for_all(ranks):
    assert_same(ranks, of_rank_0)


def residuals_of_rank_0(rank, world_size):
    model = gradwire.DistributedDataParallel(seeded(mlp), compressor="topk:ratio=0.1")
    train(model, batches(rank, 2, 3, 8))
    pickled = [pickle.dumps(model)]
    dist.broadcast_object_list(pickled)
    return error_of(pickle.loads, pickled[0])


def test_residuals_are_a_rank_s_own(ranks):
    mine, other = ranks.run(residuals_of_rank_0, 2)
    assert mine is None
    assert "residuals are a rank's own: save and load one file per rank" in other[1]


def in_a_group(rank, world_size, ddp):
    model = ddp(mlp(), process_group=dist.new_group([0, 1]))
    return error_of(pickle.dumps, model)


def test_only_models_of_the_default_group_are_pickled(ranks):
    theirs, ours = both(ranks, in_a_group)
    assert ours == theirs


def in_the_world(rank, world_size, ddp):
    model = pickle.loads(pickle.dumps(ddp(seeded(mlp), process_group=dist.group.WORLD)))
    return train(model, batches(rank, 2, 3, 8))


def test_the_default_group_may_be_given(ranks):
    assert_same(ranks, in_the_world)


def in_turn(rank, world_size):
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    return error_of(pickle.dumps, gradwire.DistributedDataParallel(mlp(), process_group=groups))


def test_models_of_several_groups_are_not_pickled(ranks):
    assert all("default process group" in text for _, text in ranks.run(in_turn, 2))


def canonical(rank, world_size, ddp):
    model = ddp(seeded(mlp))
    optimizer = torch.optim.Adam(model.parameters())
    model(batches(rank, 1, 3, 8)[0]).sum().backward()
    optimizer.step()
    parameters, state = checkpoint.get_state_dict(model, optimizer)
    checkpoint.set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=state)
    return list(parameters), sorted(state["state"])


def test_the_names_of_distributed_checkpoints(ranks):
    theirs, ours = both(ranks, canonical)
    assert ours == theirs
