"""What arguments cannot be is said when they are given, with what they may be."""

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

SECONDS = r"timeout is a datetime.timedelta, such as timedelta\(seconds=60\); got 60"


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ours(**options):
    return gradwire.DistributedDataParallel(nn.Linear(2, 2), **options)


def attached(**options):
    return gradwire.attach(TorchDDP(nn.Linear(2, 2)), "onebit", **options)


def local(**options):
    model = nn.Linear(2, 2)
    return gradwire.LocalSteps(model, **{"optimizer": torch.optim.SGD(model.parameters()), **options})


@pytest.mark.parametrize("made", [ours, attached, local])
def test_a_time_limit_is_a_timedelta_above_zero(group, made):
    with pytest.raises(TypeError, match=SECONDS):
        made(timeout=60)
    with pytest.raises(ValueError, match="timeout is above 0"):
        made(timeout=timedelta(0))


@pytest.mark.parametrize("made", [ours, attached])
def test_a_transport_is_a_function_and_a_scaler_has_a_scale(group, made):
    with pytest.raises(TypeError, match=r"transport is a function of a transport, .*; got '100mbit'"):
        made(transport="100mbit")
    with pytest.raises(TypeError, match=r"scaler is a torch.amp.GradScaler, .*; got 65536.0"):
        made(scaler=65536.0)


@pytest.mark.parametrize("made", [ours, attached])
@pytest.mark.parametrize("given", ["gloo", 3, [None]])
def test_a_process_group_is_one(group, made, given):
    with pytest.raises(TypeError, match=r"process_group is a torch.distributed.ProcessGroup, .* got"):
        made(process_group=given)


def test_dataparallel_is_told_to_start_a_process_per_gpu(group):
    with pytest.raises(TypeError, match=r"got DataParallel: it is one process.*DistributedDataParallel.*torchrun"):
        gradwire.attach(nn.DataParallel(nn.Linear(2, 2)), "int8")


def test_a_compressor_in_the_place_of_devices_is_told_its_keyword(group):
    with pytest.raises(TypeError, match=r"device_ids is .*got 'int8'.*compressor='int8'"):
        gradwire.DistributedDataParallel(nn.Linear(2, 2), "int8")


def test_a_model_that_compresses_already_needs_no_attach(group):
    with pytest.raises(RuntimeError, match=r"has int8, and needs no attach: model.compression is its handle"):
        gradwire.attach(ours(compressor="int8"), "int4")


def test_what_is_no_process_group_of_a_hook_is_told_where_the_optimizer_goes(group):
    model = TorchDDP(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"got SGD\. Other arguments.*comm_hook\('int4', optimizer=optimizer\)"):
        model.register_comm_hook(torch.optim.SGD(model.parameters()), gradwire.comm_hooks.int4)


@pytest.mark.parametrize("wrapped", [TorchDDP, gradwire.DistributedDataParallel])
def test_a_second_attach_is_refused_and_leaves_no_hooks_that_warn_later(group, wrapped):
    model = wrapped(nn.Linear(2, 2))
    handle = gradwire.attach(model, "int8")
    hooks = list(model._forward_pre_hooks)
    with pytest.raises(RuntimeError, match=r"call swap\(\) of its handle"):
        gradwire.attach(model, "int4")
    assert list(model._forward_pre_hooks) == hooks
    handle.close()


def test_distributed_data_parallel_takes_a_module(group):
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, got NoneType"):
        gradwire.DistributedDataParallel(None)


def test_local_steps_say_what_they_take(group):
    for options, words in (
        ({"optimizer": None}, r"optimizer is a torch.optim.Optimizer, .*; got None"),
        ({"at": "10.0.0.1:29400"}, r"at is a gradwire.Rendezvous, .*; got '10.0.0.1:29400'"),
    ):
        with pytest.raises(TypeError, match=words):
            local(**options)
    with pytest.raises(TypeError, match=r"model is a torch.nn.Module, got 'gpt'"):
        gradwire.LocalSteps("gpt", None)
    for every in (0, "64", 2.5):
        with pytest.raises(ValueError, match=f"every is a whole number from 1 on; got {every!r}"):
            local(every=every)
    for fragments in (0, 1.5, 65):
        with pytest.raises(ValueError, match=f"fragments is a whole number from 1 to every, 64; got {fragments}"):
            local(every=64, fragments=fragments)


def test_overlap_and_plan_take_numbers(group):
    model = ours()
    with pytest.raises(ValueError, match="slice_mb is a number of MiB above 0, got '2'"):
        gradwire.overlap(model, torch.optim.SGD(model.parameters()), slice_mb="2")
    for wrong in (0, 2.5, "8"):
        with pytest.raises(ValueError, match=f"world_size is a whole number, at least 1; got {wrong!r}"):
            gradwire.plan(nn.Linear(2, 2), "bf16", world_size=wrong)


def test_an_optimizer_that_is_none_is_refused_before_anything_is_measured(group):
    with pytest.raises(TypeError, match=r"optimizer is a torch.optim.Optimizer, .*got NoneType"):
        gradwire.advise(nn.Linear(2, 2), lambda model, batch: model(batch).sum(), torch.zeros(1, 2), None)


def test_whole_numbers_may_be_numpy_s(group):
    sites = local(every=np.int64(8), fragments=np.int32(2))
    assert type(sites.every) is int
    sites.close()
    assert gradwire.plan(nn.Linear(20, 20), "bf16", world_size=np.int64(4)).compression_ratio == 2
