"""What arguments cannot be is said when they are given, with what they may be."""

from datetime import timedelta
from math import inf, nan

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.hooks.handle_of import handle_with

SECONDS = r"timeout is a datetime.timedelta, such as timedelta\(seconds=60\); got 60"


def ours(**options):
    return gradwire.DistributedDataParallel(nn.Linear(2, 2), **options)


def attached(**options):
    return gradwire.attach(TorchDDP(nn.Linear(2, 2)), "onebit", **options)


def local(**options):
    model = nn.Linear(2, 2)
    return gradwire.LocalSteps(model, **{"optimizer": torch.optim.SGD(model.parameters()), **options})


def hooked(state):
    TorchDDP(nn.Linear(2, 2)).register_comm_hook(state, gradwire.comm_hooks.int4)


def hooked_in_another_hook():
    model = TorchDDP(nn.Linear(2, 2))
    model.register_comm_hook(None, fp16_compress_wrapper(gradwire.comm_hooks.int8))
    model(torch.zeros(1, 2)).sum().backward()


def of_class(name):
    return type(name, (nn.Linear,), {})(2, 2)


def overlapped(**options):
    model = ours()
    gradwire.overlap(model, torch.optim.SGD(model.parameters()), **options)


def advised(optimizer):
    gradwire.advise(nn.Linear(2, 2), lambda model, batch: model(batch).sum(), torch.zeros(1, 2), optimizer)


def planned(world_size):
    gradwire.plan(nn.Linear(2, 2), "bf16", world_size=world_size)


LIMIT = "timeout is above 0"
FUNCTION, SCALE = (
    "transport is a function of a transport, .*; got '100mbit'",
    "scaler is a torch.amp.GradScaler, .*; got",
)
GROUP = "process_group is a torch.distributed.ProcessGroup, .* got"
WHOLE = "every is a whole number from 1 on; got"
PART, RANKS = "fragments is a whole number from 1 to every, 64; got", "world_size is a whole number, at least 1; got"
PER_GPU = "got DataParallel: it is one process.*DistributedDataParallel.*torchrun"
OPTIMIZER = "optimizer is a torch.optim.Optimizer, .*"
STEPPED = "whose steps are counted, or a list of several"
OTHERS = ([], [3], [torch.optim.SGD([torch.zeros(1)], 0.1), None])
WEIGHT = "the weight of a site is a finite number above 0, such as its batch size; got"
SECONDS_APART = "every_seconds is a finite number of seconds above 0"
WRONG = [  # a call, its error, and what the message says
    *((lambda made=made: made(timeout=60), TypeError, SECONDS) for made in (ours, attached, local)),
    *((lambda made=made: made(timeout=timedelta(0)), ValueError, LIMIT) for made in (ours, attached, local)),
    *((lambda made=made: made(transport="100mbit"), TypeError, FUNCTION) for made in (ours, attached)),
    *((lambda made=made: made(scaler=65536.0), TypeError, SCALE) for made in (ours, attached)),
    *((lambda each=each: ours(process_group=each), TypeError, GROUP) for each in ("gloo", 3, [None])),
    *((lambda each=each: attached(process_group=each), TypeError, GROUP) for each in ("gloo", 3, [None])),
    (lambda: gradwire.attach(nn.DataParallel(nn.Linear(2, 2)), "int8"), TypeError, PER_GPU),
    (lambda: gradwire.attach(nn.Linear(2, 2), "topk"), TypeError, "DistributedDataParallel, got Linear: wrap it first"),
    (lambda: gradwire.attach(None, "bf16"), TypeError, "wrap it first, or fully_shard it, then attach"),
    (
        lambda: gradwire.attach(nn.Sequential(TorchDDP(nn.Linear(2, 2))), "bf16"),
        TypeError,
        "its 0 is one: attach to that",
    ),
    (lambda: gradwire.attach(of_class("PreTrainedModel"), "bf16"), TypeError, "trainer.model_wrapped"),
    (
        lambda: gradwire.attach(of_class("FullyShardedDataParallel"), "bf16"),
        TypeError,
        "FSDP shards gradients by itself",
    ),
    (lambda: attached(time_out=None), TypeError, r"attach has no argument 'time_out' \(did you mean 'timeout'"),
    (
        lambda: gradwire.comm_hook("topk", time_out=None),
        TypeError,
        r"comm_hook has no argument 'time_out' \(did you mean 'timeout'",
    ),
    (
        lambda: gradwire.compressor("topk:ration=0.1"),
        ValueError,
        r"'topk' has no option 'ration' \(did you mean 'ratio=0.1'\?\); it has: ratio",
    ),
    (lambda: gradwire.comm_hooks.int9, AttributeError, "has no hook 'int9'; it has: .*int8"),
    (lambda: hooked("gloo"), TypeError, "process group to average on, or None"),
    (hooked_in_another_hook, RuntimeError, r"gradwire.comm_hook\('fp16\+int8'\)"),
    (
        lambda: gradwire.handle_of(TorchDDP(nn.Linear(2, 2))),
        ValueError,
        r"call gradwire.attach\(ddp_model, 'int8'\)",
    ),
    (
        lambda: gradwire.DistributedDataParallel(nn.Linear(2, 2), "int8"),
        TypeError,
        "device_ids is .*got 'int8'.*compressor='int8'",
    ),
    (
        lambda: gradwire.attach(ours(compressor="int8"), "int4"),
        RuntimeError,
        "has int8, and needs no attach: model.compression is its handle",
    ),
    (
        lambda: hooked(torch.optim.SGD([torch.zeros(1)])),
        TypeError,
        r"got SGD\. Other arguments.*comm_hook\('int4', optimizer=optimizer\)",
    ),
    (lambda: gradwire.DistributedDataParallel(None), TypeError, "takes a torch.nn.Module, got NoneType"),
    (lambda: gradwire.LocalSteps("gpt", None), TypeError, "model is a torch.nn.Module, got 'gpt'"),
    (lambda: local(optimizer=None), TypeError, f"{OPTIMIZER}; got None"),
    *((lambda each=each: local(optimizer=each), TypeError, STEPPED) for each in OTHERS),
    *((lambda each=each: local(weight=each), ValueError, WEIGHT) for each in (0.0, -1.0, inf, nan, "2")),
    *((lambda each=each: local(every_seconds=each), ValueError, SECONDS_APART) for each in (0, -1.0, inf, nan, "4")),
    (lambda: local(outliers="ignore"), ValueError, "outliers is 'keep', 'clip', 'drop'; got 'ignore'"),
    (lambda: local(compressor="adaptive"), ValueError, "a site that joins .* got 'adaptive'"),
    (lambda: local(compressor="hosts+int4"), ValueError, "whole sites.* got 'hosts.int4'"),
    (lambda: local(at="10.0.0.1:29400"), TypeError, "at is a gradwire.Rendezvous, .*; got '10.0.0.1:29400'"),
    *((lambda each=each: local(every=each), ValueError, f"{WHOLE} {each!r}") for each in (0, "64", 2.5)),
    *((lambda n=n: local(every=64, fragments=n), ValueError, f"{PART} {n}") for n in (0, 1.5, 65)),
    (lambda: overlapped(slice_mb="2"), ValueError, "slice_mb is a number of MiB above 0, got '2'"),
    *((lambda each=each: planned(each), ValueError, f"{RANKS} {each!r}") for each in (0, 2.5, "8")),
    (lambda: gradwire.plan(nn.ReLU(), "none", world_size=2), ValueError, "nothing to plan"),
    (lambda: advised(None), TypeError, f"{OPTIMIZER}got NoneType"),
]


@pytest.mark.parametrize(("call", "error", "words"), WRONG)
def test_a_wrong_argument_is_refused_with_what_it_may_be(group, call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("wrapped", [TorchDDP, gradwire.DistributedDataParallel])
def test_a_second_attach_is_refused_and_leaves_no_hooks_that_warn_later(group, wrapped):
    model = wrapped(nn.Linear(2, 2))
    handle = gradwire.attach(model, "int8")
    hooks = list(model._forward_pre_hooks)
    with pytest.raises(RuntimeError, match=r"call swap\(\) of its handle"):
        gradwire.attach(model, "int4")
    assert list(model._forward_pre_hooks) == hooks
    assert gradwire.handle_of(model) is handle
    handle.close()
    with pytest.raises(RuntimeError, match="the handle is closed"):
        handle.swap("int4")


def test_a_hook_on_a_model_with_a_compressor_is_refused_and_leaves_no_handle(group):
    model = ours(compressor="int8")
    hooks = list(model._forward_pre_hooks)
    with pytest.raises(RuntimeError, match="has int8, and needs no attach"):
        model.register_comm_hook(None, gradwire.comm_hook("int4"))
    assert list(model._forward_pre_hooks) == hooks
    assert handle_with(next(model.parameters())) is None


def test_whole_numbers_may_be_numpy_s(group):
    sites = local(every=np.int64(8), fragments=np.int32(2))
    assert type(sites.every) is int
    sites.close()
    assert gradwire.plan(nn.Linear(20, 20), "bf16", world_size=np.int64(4)).compression_ratio == 2
