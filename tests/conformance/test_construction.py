"""The constructor takes what torch's takes, refuses what it refuses, and shows the same attributes."""

import dataclasses
import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradwire
from gradwire.ddp_core.torch_compat.arguments import Arguments

from ..torch_versions import buffers_by_argument
from .both import KINDS, assert_same, batches, both, error_of, mlp, seeded, train


def test_arguments_have_torchs_order_and_defaults():
    theirs = list(inspect.signature(KINDS["torch"].__init__).parameters.values())[2:]
    ours = dataclasses.fields(Arguments)[: len(theirs)]
    assert [each.name for each in ours] == [each.name for each in theirs]
    if "forward_sync_buffers" not in [each.name for each in theirs]:
        pytest.skip("before torch 2.13 broadcast_buffers was True instead of None")
    assert [each.default for each in ours] == [each.default for each in theirs]


REFUSED = {
    "no gradient to average": (lambda: nn.Linear(2, 2).requires_grad_(False), {}),
    "no parameters": (nn.Module, {}),
    "several device ids": (mlp, {"device_ids": [0, 1]}),
    "a device id on the CPU": (mlp, {"device_ids": [0]}),
    "an output device on the CPU": (mlp, {"output_device": 1}),
    "lazy parameters": (lambda: nn.LazyLinear(3), {}),
    "synchronized batch norm on the CPU": (lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), {}),
    "half of two arguments": (mlp, {"delay_all_reduce_named_params": []}),
}


def refusals(rank, world_size, ddp):
    return {case: error_of(ddp, build(), **options) for case, (build, options) in REFUSED.items()}


def test_refusals_are_of_torchs_type(ranks):
    theirs, ours = both(ranks, refusals)
    for case, (kind, text) in ours[0].items():
        assert kind == theirs[0][case][0], case
        if case in WORDED_ALIKE:
            assert text[:50] == theirs[0][case][1][:50]


WORDED_ALIKE = {"several device ids", "a device id on the CPU", "synchronized batch norm on the CPU", "no parameters"}
OURS_ALONE = {
    "mixed_precision": (object(), "torch.autocast"),
    "param_to_hook_all_reduce": (object(), "leave those parameters"),
    "bucket_cap_mb": (-1, "above 0"),
    "process_group": ([], "empty list"),
    "no_such_argument": (1, "no_such_argument"),
}


def ours_alone(rank, world_size):
    ddp = gradwire.DistributedDataParallel
    return {name: error_of(ddp, mlp(), **{name: value}) for name, (value, _) in OURS_ALONE.items()}


def test_refused_arguments_are_named_with_the_way_out(ranks):
    for name, (_, text) in ranks.run(ours_alone, 2)[0].items():
        assert OURS_ALONE[name][1] in text


def group_and_mesh(rank, world_size, ddp):
    mesh = init_device_mesh("cpu", (world_size,))
    both_given = error_of(ddp, mlp(), process_group=dist.group.WORLD, device_mesh=mesh)
    plane = init_device_mesh("cpu", (1, world_size))
    return both_given, error_of(ddp, mlp(), device_mesh=plane)


def test_a_mesh_is_one_dimensional_and_alone(ranks):
    theirs, ours = both(ranks, group_and_mesh)
    assert ours == theirs


def on_a_mesh(rank, world_size, ddp):
    model = ddp(seeded(mlp), device_mesh=init_device_mesh("cpu", (world_size,)))
    return train(model, batches(rank, 3, 3, 8)), model.device_mesh.size()


def test_a_mesh_is_a_process_group(ranks):
    assert_same(ranks, on_a_mesh)


def of_some_ranks(rank, world_size, ddp):
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    model = ddp(seeded(mlp), process_group=group)
    return train(model, batches(rank, 3, 3, 8))


def test_a_group_of_some_ranks(ranks):
    assert_same(ranks, of_some_ranks, world_size=3)


ATTRIBUTES = """
    device device_ids output_device device_type is_multi_device_module dim static_graph find_unused_parameters
    require_backward_grad_sync require_forward_param_sync gradient_as_bucket_view broadcast_buffers mixed_precision
    forward_sync_buffers parameters_to_ignore broadcast_bucket_size bucket_bytes_cap bucket_bytes_cap_list
    bucket_bytes_cap_default skip_all_reduce_unused_params batched_grad_copy lazy_bucket_allocation logger reducer
    use_side_stream_for_tensor_copies modules_buffers named_module_buffers _module_parameters _comm_hooks
    _has_rebuilt_buckets _lazy_init_ran _ddp_sink_clone _use_python_reducer require_manual_backward_finalization
    should_finalize_after_backward join_device _distributed_rank
"""
SETTINGS = [
    {},
    {"bucket_cap_mb": 5},
    {"bucket_cap_mb": 25},
    {"bucket_cap_mb_list": [1, 4, 2]},
    {"bucket_cap_mb_list": [1, 4], "bucket_cap_mb": 3},
    {"bucket_cap_mb_list": []},
    {"forward_sync_buffers": False},
    {"broadcast_buffers": False},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "static_graph": True},
]


def attributes(rank, world_size, ddp):
    return [attributes_of(quietly(ddp, **settings)) for settings in SETTINGS]


def quietly(ddp, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ddp(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), **settings)


def attributes_of(model):
    read = {name: getattr(model, name) for name in ATTRIBUTES.split() if hasattr(model, name)}
    simple = (bool, int, float, str, list, set, type(None), torch.device)
    plain = {name: value for name, value in read.items() if type(value) in simple and name != "logger"}
    kept = {name: value for name, value in plain.items() if not name.endswith(("_buffers", "_parameters"))}
    return kept, sorted(read)


@buffers_by_argument
def test_attributes_have_torchs_values(ranks):
    theirs, ours = both(ranks, attributes)
    for settings, here, there in zip(SETTINGS, ours[0], theirs[0], strict=True):
        assert here == there, settings


DEPRECATED = [
    {},
    {"broadcast_buffers": True},
    {"broadcast_buffers": False},
    {"broadcast_buffers": False, "forward_sync_buffers": True},
    {"check_reduction": True},
    {"forward_sync_buffers": False},
]


def deprecations(rank, world_size, ddp):
    return [told_of(ddp, settings) for settings in DEPRECATED]


def told_of(ddp, settings):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ddp(nn.Linear(2, 2), **settings)
    told = [str(each.message) for each in caught if each.category is FutureWarning]
    return len(told), any("`broadcast_buffers`" in text for text in told), model.forward_sync_buffers


@buffers_by_argument
def test_torchs_deprecations(ranks):
    theirs, ours = both(ranks, deprecations)
    assert ours == theirs


STARTS = [{}, {"init_sync": False}, {"forward_sync_buffers": False}, {"broadcast_buffers": False}]


def starts(rank, world_size, ddp):
    return [initial_state(rank, ddp, settings) for settings in STARTS]


def initial_state(rank, ddp, settings):
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    net[1].running_mean += rank + 1
    ddp._set_params_and_buffers_to_ignore_for_model(net, ["0.bias"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: each.clone() for name, each in ddp(net, **settings).state_dict().items()}


@buffers_by_argument
def test_states_at_the_start(ranks):
    assert_same(ranks, starts)


def ignoring(rank, world_size, ddp):
    net = seeded(mlp)
    ddp._set_params_and_buffers_to_ignore_for_model(net, ["0.weight", "2.bias"])
    model = ddp(net)
    model(batches(rank, 1, 3, 8)[0]).sum().backward()
    managed = sum(1 for _ in model._get_data_parallel_params(model.module))
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}, managed


def test_ignored_parameters_keep_their_own_gradients(ranks):
    (first, _), (second, _) = assert_same(ranks, ignoring)
    assert not first["module.0.weight"].equal(second["module.0.weight"])


def different_ignored(rank, world_size, ddp):
    net = nn.ModuleDict({"shared": nn.Linear(2, 2), "own": nn.Linear(2 + rank, 2)})
    ddp._set_params_and_buffers_to_ignore_for_model(net, ["own.weight", "own.bias"])
    model = ddp(net)
    return model.module["own"].weight.shape


def test_ignored_parameters_may_differ_between_ranks(ranks):
    theirs, ours = both(ranks, different_ignored)
    assert ours == theirs


def different(rank, world_size):
    return error_of(gradwire.DistributedDataParallel, nn.Linear(2, 3 if rank else 2))


def test_different_models_are_refused_on_all_ranks(ranks):
    for _, text in ranks.run(different, 2):
        assert "DDP expects same model across all ranks" in text
        assert "rank 0 has parameter weight with shape (2, 2)" in text
