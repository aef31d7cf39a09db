"""The memory that compression keeps between steps: exact, by all tensors that there are."""

import gc
import sys
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradwire
from gradwire.ddp_core.engine.lanes import Task
from gradwire.experiments.sharded_plan import plan_sharded
from gradwire.experiments.sites_plan import SitesPlan, Wan, round_plans
from gradwire.hooks.local_sgd.rounds import Rounds
from gradwire.kernels import pool

from ...torch_versions import copied_in_cpp, fsdp_of_others
from ..wrapping import wrapped

WIDTH, LAYERS, RANKS = 256, 4, 2
SMALL = 64  # width where work takes no blocks of the pool,
MANY = 16  # and so many layers that the gradient of one is small beside it
NARROW = 1 + 4 / 128  # bytes of an element in 8 bits, with its part of a scale
FACTORS = 4 * 4 / WIDTH  # PowerSGD's Q, of rank 4
A_LAYER = 0.35  # bytes per parameter of what a layer computes: its gradient and activations
SHARDED = 12  # layers
PATIENCE = 20.0  # seconds
ROOM = 0.1  # bytes per parameter of what is small
SLACK = 0.01  # a process that ran other tests may drop some of their tensors meanwhile
STATE = {  # bytes per parameter
    "none": 0,
    "bf16": 0,
    "topk": 4,
    "powersgd:rank=4": 4 + 2 * FACTORS,  # what ranks share has a second copy
    "int8": 0,
    "int4": 4 + 4 / RANKS,
    "onebit": 4 + 4 / RANKS,
    "int4:error_feedback=false": 0,
    "topk:residual_bits=16": 2,
    "int4:residual_bits=8": NARROW * (1 + 1 / RANKS),
}


def square(width, layers=LAYERS):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def sharded(width, layers, world_size):
    model, mesh = square(width, layers), init_device_mesh("cpu", (world_size,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


def live():
    """Bytes of all tensors, each memory once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors if not each.is_sparse and each.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def settled():
    """The same where nothing is under way."""
    found = [live()]
    while len(found) < 3 or len({*found[-3:]}) > 1:
        time.sleep(0.02)
        found.append(live())
    return found[-1]


def per_parameter(before, most):
    """Bytes per parameter since then; more than `most` only if threads do not let go of the task that they have ended."""
    deadline = time.monotonic() + PATIENCE
    while (found := (live() - before) / (LAYERS * WIDTH**2)) > most and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def kept(rank, world_size, spec, ours, undo, most):
    """Bytes per parameter beyond parameters and gradients, after steps."""
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.3}
    return kept_by(lambda: wrapped(ours, square(WIDTH), spec, {"undo": undo}, **options), rank, 8, most)


def kept_by(made, rank, dense, most):
    """The same of the model and the handle that are `made`, whose parameters and gradients take `dense` bytes each."""
    before = settled()
    model, handle = made()
    for step in range(4):
        model.zero_grad()
        model(torch.full((2, WIDTH), step + rank + 1.0)).square().mean().backward()
    found = per_parameter(before, dense + most)
    handle.close()
    return found - dense


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("spec", STATE)
def test_compression_keeps_one_copy_of_residuals_and_nothing_else(ranks, spec, ours):
    for found in ranks.run(kept, RANKS, spec, ours, False, STATE[spec] + ROOM):
        assert STATE[spec] - SLACK <= found <= STATE[spec] + ROOM


@pytest.mark.parametrize("spec", STATE)
def test_a_plan_tells_the_state_to_the_byte(spec):
    plan = gradwire.plan(square(WIDTH), spec, world_size=RANKS, bucket_mb=0.3)
    assert plan.state_bytes == STATE[spec] * LAYERS * WIDTH**2


def test_a_plan_has_buckets_on_their_way_one_of_which_is_computed_in_each_round():
    width, buckets = 1024, 4
    wide = 4 * width**2
    payload = wide // 8 + wide // 128
    encoded, served = wide + payload, payload + wide // 2 + payload // 2 + wide // 2  # with residuals in float32
    plan = gradwire.plan(square(width, buckets), "int4:residual_bits=8", world_size=2, bucket_mb=1)
    assert plan.work_bytes == buckets * 2 * payload + (encoded - 2 * payload) + (served - 2 * payload)


@pytest.mark.parametrize(("spec", "state"), [("topk", 8), ("int4", 12)])
def test_undo_from_the_start_keeps_two(ranks, spec, state):
    for found in ranks.run(kept, RANKS, spec, True, True, state + ROOM):
        assert state - SLACK <= found <= state + ROOM


def kept_of_shards(rank, world_size, reduce, undo, most):
    """Bytes per parameter of the whole model beyond shards of parameters and gradients, after steps."""

    def made():
        model = sharded(WIDTH, LAYERS, world_size)
        return model, gradwire.attach(model, reduce=reduce, undo=undo)

    return kept_by(made, rank, 8 / world_size, most)


@fsdp_of_others
@pytest.mark.parametrize(
    ("reduce", "undo", "state"),
    [("int8", False, 0), ("int4", False, 4), ("int4:residual_bits=8", False, NARROW), ("int4", True, 8)],
)
def test_of_shards_there_is_one_copy_of_residuals_too(ranks, reduce, undo, state):
    for found in ranks.run(kept_of_shards, RANKS, reduce, undo, state + ROOM):
        assert state - SLACK <= found <= state + ROOM


def has_memory(each):
    return isinstance(each, torch.Tensor) and not each.is_meta


class Peak(TorchDispatchMode):
    """The most bytes that the tensors of all operations took at once, each memory once."""

    def __init__(self):
        super().__init__()
        self.storages, self.most, self.lock = {}, 0, threading.Lock()

    def known(self, key):
        """The storage that was last seen at an address, None where it is gone, and its bytes then."""
        ref, size = self.storages.get(key, (lambda: None, 0))
        return ref(), size

    def see(self, *given):
        tensors = [getattr(each, "_local_tensor", each) for each in tree_leaves(given) if has_memory(each)]
        with self.lock:
            given = {storage._cdata: storage for storage in (each.untyped_storage() for each in tensors)}
            if all(self.known(key) == (storage, storage.nbytes()) for key, storage in given.items()):
                return  # nothing has grown
            seen = self.storages | {key: (weakref.ref(storage), 0) for key, storage in given.items()}
            there = {key: (ref, storage) for key, (ref, _) in seen.items() if (storage := ref()) is not None}
            self.storages = {key: (ref, storage.nbytes()) for key, (ref, storage) in there.items()}
            self.most = max(self.most, sum(size for _, size in self.storages.values()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.see(args, kwargs)
        result = function(*args, **(kwargs or {}))
        self.see(result)
        return result


class Beside(TorchDispatchMode):
    """What another thread does, for a peak of all threads."""

    def __init__(self, peak):
        super().__init__()
        self.peak = peak

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.peak.__torch_dispatch__(function, types, args, kwargs)


@contextmanager
def peak_of_all_threads(owner, name):
    """The peak of a block and of all calls of a method, which other threads make."""
    peak, method = Peak(), getattr(owner, name)

    def counted(*given, **options):
        with Beside(peak):
            return method(*given, **options)

    with pytest.MonkeyPatch.context() as patch, peak:
        patch.setattr(owner, name, counted)
        yield peak


NARROW_ONES = ["int4:residual_bits=8", "int2:residual_bits=8"]  # the latter's unused rows are cleared in its codes


def peak_of_buckets(rank, world_size, spec, ours):
    """Bytes per parameter at the peak of a step beyond parameters and gradients, in all threads. There is one bucket."""
    found = []
    with pytest.MonkeyPatch.context() as patch, peak_of_all_threads(Task, "advance") as peak:
        patch.setenv("GRADWIRE_SHARED_MEMORY", "0")  # else replies are parts of what ranks share
        model, handle = wrapped(ours, square(SMALL, MANY), spec, gradient_as_bucket_view=True)
        for step in range(6):
            model.zero_grad()
            peak.most = 0
            model(torch.full((1, SMALL), step + rank + 1.0)).square().mean().backward()
            found.append(peak.most)
    handle.close()
    return min(found[3:]) / (MANY * SMALL**2) - 8  # before, buckets are built anew; a thread may let go late


@pytest.mark.parametrize("ours", [pytest.param(True, marks=copied_in_cpp), False])
@pytest.mark.parametrize("spec", ["none", "int8", "int4", *NARROW_ONES, "powersgd:rank=4", "topk"])
def test_a_step_takes_at_peak_what_is_planned(ranks, spec, ours):
    plan = gradwire.plan(square(SMALL, MANY), spec, world_size=RANKS)
    uncopied = 4 * plan.parameters if ours else 0  # gradients, until the bucket is complete and they are copied into it
    planned = max(plan.peak_bytes, plan.state_bytes + uncopied) / plan.parameters
    for found in ranks.run(peak_of_buckets, RANKS, spec, ours):
        assert found == pytest.approx(planned, rel=0.1, abs=A_LAYER)


def pooled(rank, world_size, spec):
    """Bytes of the pool at most, with one bucket on its way at a time, once torch has built its buckets anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["gradwire.kernels.memory_pool"], "SMALLEST", 1)
        patch.setattr(sys.modules["gradwire.ddp_core.engine.in_flight"], "FEWEST", 1)
        patch.setattr(sys.modules["gradwire.ddp_core.engine.in_flight"], "MOST_BYTES", 0)
        model = TorchDDP(square(WIDTH), gradient_as_bucket_view=True, bucket_cap_mb=0.1)
        handle = gradwire.attach(model, spec)
        for _ in range(4):
            model(torch.ones(2, WIDTH)).square().mean().backward()
            until = time.monotonic() + PATIENCE
            while pool.free_bytes < 0.5 * pool._most and time.monotonic() < until:  # a lane's thread has the last task
                time.sleep(0.001)
                pool.tensor((1,), torch.uint8)  # which collects what came back
        most = pool._most
    handle.close()
    return most


@pytest.mark.parametrize("spec", ["int8", "int4:residual_bits=8"])  # of the latter the move of states takes memory, too
def test_the_pool_keeps_nothing_of_the_single_bucket_that_torch_begins_with(ranks, spec):
    whole = gradwire.plan(square(WIDTH), spec, world_size=RANKS).work_bytes  # in one bucket
    for most in ranks.run(pooled, RANKS, spec):
        assert 0 < most < 0.6 * whole


def peak_of_shards(rank, world_size, gather, reduce, width):
    """Bytes per parameter of the whole model at the peak of steps, parameters and gradients among them."""
    gc.collect()  # of the model before
    model = sharded(width, SHARDED, world_size)
    handle = gather and gradwire.attach(model, gather=gather, reduce=reduce)
    peak, found = Peak(), []
    for step in range(3):
        model.zero_grad()
        peak.most = 0
        peak.see([each for each in gc.get_objects() if type(each) is torch.Tensor])  # made where no operation shows
        with peak:
            model(torch.full((2, width), step + rank + 1.0)).square().mean().backward()
        found.append(peak.most)
    if handle:
        handle.close()
    return min(found[1:]) / (SHARDED * width**2)  # a thread may let go late


def peaks_beyond_torch(rank, world_size, pairs, width):
    without = peak_of_shards(rank, world_size, None, None, width)
    return [peak_of_shards(rank, world_size, *pair, width) - without for pair in pairs]


PAIRS = [("none", "none"), ("bf16", "bf16"), ("int4", "int4")]


@pytest.mark.slow
@fsdp_of_others
@pytest.mark.parametrize(
    ("pairs", "width"),
    [(PAIRS, SMALL), ([("int8", "int4:residual_bits=8")], 98)],  # of which a module's rows are copied to be longer
)
def test_shards_take_at_peak_what_is_planned(ranks, pairs, width):
    parts = [{str(place): torch.empty(width, width, device="meta")} for place in range(SHARDED)]
    planned = [plan_sharded(parts, *pair, world_size=RANKS).bytes_per_parameter for pair in pairs]
    for found in ranks.run(peaks_beyond_torch, RANKS, pairs, width, timeout=200):
        assert found == pytest.approx(planned, rel=0.1)


def kept_of_local_steps(rank, world_size, compressor, most):
    """Bytes per parameter beyond parameters and gradients, between two rounds."""
    before = settled()
    model = square(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = gradwire.LocalSteps(model, optimizer, every=2, fragments=2, compressor=compressor)
    for step in range(8):
        model(torch.full((2, WIDTH), step + rank + 1.0)).square().mean().backward()
        optimizer.step()
    local.synchronize()
    found = per_parameter(before, 8 + most)
    local.close()
    return found - 8


@pytest.mark.parametrize(("compressor", "residuals"), [("none", 0), ("int4", 4 + 4 / RANKS)])
def test_local_steps_keep_an_anchor_the_outer_momentum_and_one_copy_of_residuals(ranks, compressor, residuals):
    for found in ranks.run(kept_of_local_steps, RANKS, compressor, 8 + residuals + ROOM):
        assert 8 + residuals - SLACK <= found <= 8 + residuals + ROOM


def peak_of_local_steps(rank, world_size, compressor):
    """Bytes per parameter at the peak of rounds beyond parameters and gradients, in all threads."""
    found = []
    with peak_of_all_threads(Rounds, "_until_done") as peak:
        model = square(SMALL, MANY)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"every": 2, "fragments": 2, "overlap": False, "compressor": compressor}
        local = gradwire.LocalSteps(model, optimizer, **options)
        for step in range(6):
            model.zero_grad()
            peak.most = 0
            model(torch.full((1, SMALL), step + rank + 1.0)).square().mean().backward()
            optimizer.step()
            found.append(peak.most)
    local.close()
    return min(found[2:]) / (MANY * SMALL**2) - 8  # before, residuals are made; a thread may let go late


@pytest.mark.parametrize("compressor", ["none", "int4", "powersgd:rank=4", "int4:residual_bits=8"])
def test_local_steps_take_at_peak_what_is_planned(ranks, compressor):
    parameters = {str(place): torch.empty(SMALL, SMALL, device="meta") for place in range(MANY)}
    plan = SitesPlan(2, round_plans(gradwire.compressor(compressor), parameters, Wan(RANKS, 1.0, 1.0), 2), 1.0)
    planned = (plan.state_bytes + plan.work_bytes) / (MANY * SMALL**2)
    for found in ranks.run(peak_of_local_steps, RANKS, compressor):
        assert found == pytest.approx(planned, rel=0.1)
