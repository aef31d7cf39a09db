"""Hooks of torch's signature: without a handle first, one state a model, the same averages as by `attach`."""

import copy
import gc
import importlib
import inspect
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire import DistributedDataParallel as OwnDDP

from ..forked import LIMIT, Script
from .given import Given, average, gradients, same

ROOT = Path(__file__).parents[2]
SHAPES = ((40, 30), (40,))
SPEC = "topk:ratio=0.1"
WRAPPERS = {"torch's DDP": TorchDDP, "own DDP": OwnDDP}
PATHS = ["bf16", "int8", "int4", "powersgd", "batched_powersgd"]


def averages(ddp, rank, steps=3):
    return [average(ddp, gradients(rank, step, SHAPES)) for step in range(steps)]


def both(rank, world_size, wrapper):
    """The averages and the state by attach, and by the hook."""
    attached, hooked = (WRAPPERS[wrapper](Given(SHAPES)) for _ in range(2))
    handle = gradwire.attach(attached, SPEC)
    hooked.register_comm_hook(None, gradwire.comm_hook(SPEC))
    other = gradwire.handle_of(hooked)
    found = averages(attached, rank), averages(hooked, rank)
    states = handle.state_dict(), other.state_dict()
    handle.close()
    other.close()
    return *found, *states


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_hook_averages_and_remembers_as_attach_does(ranks, wrapper):
    for attached, hooked, state, other in ranks.run(both, 2, wrapper):
        assert same(hooked, attached)
        assert same(other, state)


@pytest.mark.parametrize("name", PATHS)
def test_a_hook_is_imported_by_its_dotted_path_and_has_torchs_signature(name):
    hook = getattr(importlib.import_module("gradwire.comm_hooks"), name)
    assert list(inspect.signature(hook).parameters) == ["state", "bucket"]
    assert name in dir(gradwire.comm_hooks)
    for twin in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert repr(twin) == repr(hook)


def two_models(rank, world_size):
    """Each model's averages with one hook for both whose backward is one, and with a hook of its own each."""
    answers = []
    shared = gradwire.comm_hook("onebit")
    for hooks in ([shared, shared], [gradwire.comm_hook("onebit") for _ in range(2)]):
        models = [TorchDDP(Given(SHAPES), find_unused_parameters=True, bucket_cap_mb=0.001) for _ in range(2)]
        for model, hook in zip(models, hooks, strict=True):
            model.register_comm_hook(None, hook)
        found = []
        for step in range(3):
            sum(model(gradients(rank, 10 * step + each, SHAPES)) for each, model in enumerate(models)).backward()
            found.append([parameter.grad.clone() for model in models for parameter in model.parameters()])
            for model in models:
                model.zero_grad()
        handles = list(map(gradwire.handle_of, models))
        answers.append((found, [handle.state_dict() for handle in handles]))
        for handle in handles:
            handle.close()
    return answers, handles[0] is handles[1]


def test_two_models_with_one_hook_share_no_state_even_in_one_backward(ranks):
    for (shared, apart), same_handle in ranks.run(two_models, 2):
        assert not same_handle
        assert same(shared, apart)


def wrapped_anew(rank, world_size):
    """Whether a module that is wrapped again starts with a handle of its own, which lives as long as the new wrapper."""
    module, hook = Given(SHAPES), gradwire.comm_hook(SPEC)
    ddp = TorchDDP(module)
    ddp.register_comm_hook(None, hook)
    averages(ddp, rank)
    first = gradwire.handle_of(ddp)
    ddp = TorchDDP(module)
    ddp.register_comm_hook(None, hook)
    second = gradwire.handle_of(ddp)
    averages(ddp, rank)
    steps = first.stats().steps, second.stats().steps
    gone = weakref.ref(second)
    first.close()
    second.close()
    del ddp, first, second, module
    gc.collect()
    return steps, gone() is None


def test_a_model_that_is_wrapped_anew_has_a_new_handle_and_none_outlives_its_model(ranks):
    assert ranks.run(wrapped_anew, 2) == [((3, 3), True)] * 2


def in_a_group(rank, world_size):
    """The averages of ranks in pairs."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = TorchDDP(Given(SHAPES), process_group=groups[rank // 2])
    ddp.register_comm_hook(groups[rank // 2], gradwire.comm_hooks.none)
    found = average(ddp, [torch.full(shape, float(rank)) for shape in SHAPES])
    gradwire.handle_of(ddp).close()
    return found["p1"][0].item()


def test_the_state_is_the_group_to_average_on(ranks):
    assert ranks.run(in_a_group, 4) == [0.5, 0.5, 2.5, 2.5]


NEVER = """
import gradwire
hook = gradwire.comm_hooks.int8
if {called}:
    hook.called = True
"""


@pytest.mark.parametrize(("called", "world_size", "warned"), [(False, 2, True), (True, 2, False), (False, 1, False)])
def test_a_hook_that_was_never_called_is_warned_of_when_the_process_ends(called, world_size, warned, tmp_path):
    variables = {**os.environ, "WORLD_SIZE": str(world_size), "RANK": "0"}
    code = NEVER.format(called=called) + "gradwire.hooks.comm_hook._warn_of_hooks_never_called()"
    ended = Script(code, folder=tmp_path, variables=variables).end()
    assert ended.code == 0, ended
    assert ("gradwire.comm_hooks.int8 was never called" in ended.errors) == warned


@pytest.mark.slow
def test_the_warning_is_given_at_the_end_of_a_script():
    variables = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    command = [sys.executable, "-c", "import gradwire; gradwire.comm_hooks.int8"]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert "gradwire.comm_hooks.int8 was never called" in done.stderr
