"""What differs among process groups stays in one file, and trainings are alike on a backend as torchcomms wraps it."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.compress import AllReduce
from gradwire.ddp_core.transport import torch_groups
from gradwire.ddp_core.transport.process_group import GroupPending, over, started
from gradwire.ddp_core.transport.torch_groups import clone_group, polled, takes_time_limits, time_limit_of

from ...torch_versions import backends_in_python
from ..errors import message_of
from ..layers import Layers, inputs_of
from ..wrapping import wrapped
from . import wrapped_backend

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
STEPS = 3


def group_of(backend):
    wrapped_backend.register()
    return dist.new_group(backend=backend)


WAYS = {"attach": (False, "int8"), "own DDP": (True, "powersgd:rank=1"), "own DDP, none": (True, "none")}


def trained(way, rank, backend):
    """Parameters after steps, every other of which uses one layer alone, and the state that the first rank gathers."""
    own, spec = WAYS[way]
    model, handle = wrapped(own, Layers(), spec, process_group=group_of(backend), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        model(inputs_of(rank, step), (1,) if step % 2 else range(4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gathered = handle.gather_state_dict()
    handle.scatter_state_dict(gathered)
    handle.close()
    return torch.cat([each.detach().view(-1) for each in model.parameters()]), len(gathered.get("ranks", ()))


def both(rank, world_size, way):
    return [trained(way, rank, backend) for backend in ("gloo", wrapped_backend.NAME)]


@backends_in_python
@pytest.mark.parametrize("way", WAYS)
def test_a_training_is_the_same_on_a_backend_that_refuses_time_limits_and_futures(ranks, way):
    for rank, ((expected, _), (found, gathered)) in enumerate(ranks.run(both, 2, way)):
        assert torch.equal(found, expected)
        assert gathered == (2 if rank == 0 else 0)


def local(rank, world_size):
    """Parameters after local SGD on either backend."""
    answers = []
    for backend in ("gloo", wrapped_backend.NAME):
        group = group_of(backend)
        model = nn.Linear(6, 5)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        steps = gradwire.LocalSteps(model, optimizer, every=2, fragments=1, compressor="int8", process_group=group)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * rank + step)
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            optimizer.step()
        steps.finish()
        answers.append(model.weight.detach().clone())
    return [bool(each.isfinite().all()) for each in answers], answers[1]


@backends_in_python
def test_local_sgd_runs_on_such_a_backend(ranks):
    answers = ranks.run(local, 2)
    for finite, weight in answers:
        assert finite == [True, True]
        assert torch.equal(weight, answers[0][1])


def waits(rank, world_size):
    """What the stand-in refuses; and a wait for a rank that comes late, within the limit and beyond it."""
    group = group_of(wrapped_backend.NAME)
    work = group.allreduce([torch.ones(2)])
    refused = [message_of(work.wait, timedelta(seconds=5)), message_of(work.get_future)]
    work.wait()
    pending = GroupPending(work, torch.ones(2))
    pending.expect_late_wait(time.perf_counter)  # no future tells of its end
    answer = (
        started(AllReduce(torch.full((3,), rank + 1.0), "sum"), group, timed=False).wait(timedelta(seconds=20)).tolist()
    )
    message = ""
    if rank == 0:
        late = group.allreduce([torch.ones(2)])
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            polled(late, 0.05)
        message = str(caught.value) if time.monotonic() - began >= 0.05 else "too soon"
    dist.barrier()
    if rank == 1:
        late = group.allreduce([torch.ones(2)])
    polled(late, 20)
    return (
        refused,
        pending.arrived,
        answer,
        message,
        takes_time_limits(group, CPU),
        takes_time_limits(dist.group.WORLD, CPU),
    )


@backends_in_python
def test_waits_end_in_time_where_a_backend_refuses_time_limits(ranks):
    for rank, (refused, future, answer, message, *timed) in enumerate(ranks.run(waits, 2)):
        assert "wait timeout not supported" in refused[0]
        assert "not implemented" in refused[1]
        assert future is None
        assert answer == [3.0] * 3
        assert message == ("the collective has not ended within 0.050 s" if rank == 0 else "")
        assert timed == [False, True]


def cloned(rank, world_size):
    """The time limit and the description of a clone of some ranks' group, and a sum over it."""
    parent = dist.new_group(list(range(world_size)), timedelta(seconds=77), "gloo")
    clone = clone_group(parent, time_limit_of(parent, CPU, timedelta(0)))
    dist.all_reduce(value := torch.tensor(rank + 1.0), group=clone)
    return time_limit_of(clone, CPU, timedelta(0)).total_seconds(), clone.group_desc, value.item()


def test_a_clone_of_a_group_has_its_time_limit_and_a_description(ranks):
    assert ranks.run(cloned, 2) == [(77.0, "gradwire: messages of ranks [0, 1]", 3.0)] * 2


@pytest.mark.parametrize(
    ("backend", "known", "lazy"),
    [("nccl2", True, True), ("nccl", True, True), ("nccl", False, False), ("gloo", True, False)],
)
def test_a_clone_of_nccl_is_split_from_no_group_whose_other_ranks_take_no_part(monkeypatch, backend, known, lazy):
    made, cuda = [], SimpleNamespace(name=lambda: backend)
    group = SimpleNamespace(_get_backend=lambda device: cuda, _device_types=[torch.device("cuda")])
    options = type("Options", (), {"_timeout": None, "lazy_init": False} if known else {})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [1, 3])
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    monkeypatch.setattr(dist, "new_group", lambda *given, **named: made.append((given, named)) or dist.group.WORLD)
    monkeypatch.setattr(dist, "ProcessGroup", object)
    clone_group(group, timedelta(minutes=2))
    (((ranks, limit, kind, given), named),) = made
    assert (ranks, limit, kind, named["use_local_synchronization"]) == ([1, 3], timedelta(minutes=2), backend, True)
    assert (given is not None) == lazy
    assert not lazy or (given.lazy_init, given._timeout) == (True, limit)


BY_VARIABLE = """
import torch
from torch.distributed import config
import gradwire

gradwire.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
handle = gradwire.attach(model, "int8")
model(torch.ones(2, 4)).sum().backward()
print(config.use_torchcomms, handle.stats().steps)
"""


@pytest.mark.slow  # a new process
@backends_in_python
def test_the_variable_of_torchs_switch_for_torchcomms_changes_nothing_either():  # torch reads it as it is imported
    variables = {**os.environ, "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
    command = [sys.executable, "-c", BY_VARIABLE]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["True", "1"]


class ProcessGroupNCCL2:
    """A stand-in of torch's since 2.15."""

    options = SimpleNamespace(_timeout=timedelta(minutes=2))

    def __init__(self, *arguments):
        self.arguments = arguments

    def name(self):
        return "nccl2"


def test_torchs_newer_nccl_is_known_and_groups_of_its_kind_are_made(monkeypatch):
    device, other = torch.device("cuda", 0), timedelta(minutes=30)
    parent = SimpleNamespace(_get_backend=lambda device: ProcessGroupNCCL2(), _device_types=[torch.device("cuda")])
    assert torch_groups.orders_streams(parent, device)
    assert torch_groups.message_limit(parent, device, other) == timedelta(minutes=2)
    monkeypatch.setattr(torch_groups.dist, "ProcessGroupNCCL2", ProcessGroupNCCL2, raising=False)
    options = type("Options", (), {"_timeout": None})
    monkeypatch.setattr(torch_groups.dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    registered = []
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 4, _register_backend=lambda *each: registered.append(each))
    torch_groups.register_alike(group, parent, device, "store", other)
    ((of_device, _, backend),) = registered
    assert (of_device, type(backend)) == (device, ProcessGroupNCCL2)
    store, rank, size, given, bound = backend.arguments
    assert (store, rank, size, given._timeout, bound) == ("store", 1, 4, timedelta(minutes=2), device)


@pytest.mark.parametrize(("bound", "expected"), [(torch.device("cuda", 3), "cuda:3"), (None, "cuda")])
def test_messages_of_a_group_of_gpus_go_over_the_gpu_that_it_is_bound_to(monkeypatch, bound, expected):
    moved = []

    def to(tensor, device):
        moved.append(str(device))
        raise StopIteration

    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0, _device_types=[torch.device("cuda")], bound_device_id=bound)
    monkeypatch.setattr(torch.Tensor, "to", to)
    with pytest.raises(StopIteration):
        over(group).message(AllReduce(torch.ones(1)))
    assert moved == [expected]
