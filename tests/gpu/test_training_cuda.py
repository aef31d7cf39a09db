"""What a training on CUDA is made of: steps for which the host waits nowhere, overflows, sparse gradients, uneven inputs."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import gradwire
from gradwire import kernels
from gradwire.compress import compressors

from ..hooks.given import Given, average, gradients
from .test_ddp_cuda import SPECS as COMPRESSED
from .test_ddp_cuda import Net, compressed
from .test_engine_cuda import nccl, needs_nccl

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SHAPES = ((64, 80), (9,), (48, 30))
SPECS = [*compressors(), "fp16+powersgd:rank=1", "powersgd:warm_start=false", "topk:ratio=0.01,value_dtype=fp16"]
SPECS += ["powersgd:rank=2", "topk:ratio=0.01"]
OVERFLOWING = ["topk:ratio=0.1", "onebit:block=64", "powersgd:rank=2", "fp16+powersgd:rank=2"]
OVERFLOWING += ["chunktopk:ratio=0.1,chunk=64"]
BACKENDS = {"all": "cuda,triton,reference", "triton": "triton,reference", "reference": "reference"}
WARM = 4  # steps: kernels are compiled, buckets built anew
STEPS = 28  # beyond a gauge's sample (15), the last agreement of `adaptive` (24), and what follows from it
SCALE, OVERFLOW = 64.0, 3
GENTLE = 0.01  # a learning rate at which a training does not multiply what backends round differently


def ddp_of(model, spec, own, undo=False, **settings):
    """The model in our DDP or, hooked, in torch's; and the handle."""
    if own:
        ddp = gradwire.DistributedDataParallel(model, compressor=spec, undo=undo, **settings)
        return ddp, ddp.compression
    ddp = torch.nn.parallel.DistributedDataParallel(model, **settings)
    return ddp, gradwire.attach(ddp, spec, undo=undo)


def step_under_watch(rank, world_size, spec, own, backends, dtype):
    """Training steps that raise where the host waits for the device."""
    group = nccl(rank)
    with kernels.use_backend(*(name for name in backends.split(",") if _works(name))):
        ddp, handle = ddp_of(Given(SHAPES, dtype).cuda(), spec, own, process_group=group, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        given = [each.cuda() for each in gradients(rank, 0, SHAPES, dtype)]
        told = []
        handle.watch(4, lambda numbers, step: told.append(numbers.keys()))
        for step in range(STEPS):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step >= WARM else "default")
            try:
                ddp(given).backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        handle.close()
        assert len(told) == STEPS // 4 - 1
        assert all(names >= {"exposed_seconds", "encode_seconds"} for names in told)
        return all(parameter.isfinite().all() for parameter in ddp.parameters())


def _works(name):
    return next(each for each in kernels.backends() if each.name == name).available


@needs_nccl
@pytest.mark.parametrize("backends", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_host_waits_nowhere_in_a_steady_step(ranks, spec, own, backends):
    if spec.startswith(("topk", "dgc")) and backends == "reference":
        pytest.skip("torch's operators ask the device how many elements were found")
    assert ranks.run(step_under_watch, 1, spec, own, backends, torch.float32, timeout=200) == [True]


@needs_nccl
@pytest.mark.parametrize("spec", SPECS)
def test_the_host_waits_nowhere_for_gradients_of_16_bits(ranks, spec):
    assert ranks.run(step_under_watch, 1, spec, True, BACKENDS["all"], torch.bfloat16, timeout=200) == [True]


def with_an_overflow(rank, world_size, spec, own, device="cuda"):
    """The last averages of a training with a step that overflows on one rank, and of one without that step."""
    found = []
    for steps in ((0, None, 1, 2), (0, 1, 2)):
        ddp, handle = ddp_of(Given(SHAPES).to(device), spec, own, undo=True, find_unused_parameters=True)
        for step in steps:
            given = [each.to(device) for each in gradients(rank, step or 0, SHAPES)]
            if step is None and rank == 0:
                given[0][3, 4] = torch.inf
            last = average(ddp, given)
            finite = all(numbers.isfinite().all() for numbers in last.values())
            assert finite == (step is not None)
        found.append({name: numbers.cpu() for name, numbers in last.items()})
        handle.close()
    return found


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
@pytest.mark.parametrize("spec", OVERFLOWING)
def test_a_step_that_overflows_leaves_no_trace(ranks, spec, own):
    for with_it, without in ranks.run(with_an_overflow, 2, spec, own, timeout=200):
        assert all(torch.equal(with_it[name], without[name]) for name in without)


def with_a_scaler(rank, world_size, spec, own, device="cuda"):
    """Parameters and scale after steps with a GradScaler, of which one overflows on one rank; and without that step."""
    found = []
    for overflows in (True, False):
        ddp, handle = ddp_of(Given(SHAPES).to(device), spec, own, undo=True, find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(device, init_scale=SCALE)
        handle.follow(scaler)
        for step in range(OVERFLOW + 3):
            if step == OVERFLOW and not overflows:
                scaler.update(SCALE / 2)
                continue
            given = [each.to(device) for each in gradients(rank, step, SHAPES)]
            if step == OVERFLOW and rank == 0:
                given[0][3, 4] = torch.inf
            optimizer.zero_grad()
            scaler.scale(ddp(given)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(([parameter.detach().cpu() for parameter in ddp.parameters()], scaler.get_scale()))
        handle.close()
    return found


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
@pytest.mark.parametrize("spec", OVERFLOWING)
def test_a_step_that_a_scaler_skips_leaves_no_trace_and_what_is_held_back_follows_the_scale(ranks, spec, own):
    for (with_it, scale), (without, expected) in ranks.run(with_a_scaler, 2, spec, own, timeout=200):
        assert scale == expected == SCALE / 2
        assert all(map(torch.equal, with_it, without))
        assert with_it[0].any()
        assert all(parameter.isfinite().all() for parameter in with_it)


class Sparse(nn.Module):
    """An embedding with sparse gradients before a layer."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.embedding, self.layer = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, tokens):
        return self.layer(self.embedding(tokens))


def sparse(rank, world_size, device):
    """Parameters after some steps."""
    ddp = gradwire.DistributedDataParallel(Sparse().to(device), compressor="bf16")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        tokens = torch.randint(0, 50, (6,), generator=torch.Generator().manual_seed(10 * rank + step))
        ddp(tokens.to(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in ddp.parameters()]


def sparse_on_both(rank, world_size):
    torch.cuda.set_device(0)
    return sparse(rank, world_size, "cuda"), sparse(rank, world_size, "cpu")


def test_sparse_gradients_are_averaged_as_on_the_cpu(ranks):
    for on_gpu, on_cpu in ranks.run(sparse_on_both, 2, timeout=200):
        for found, expected in zip(on_gpu, on_cpu, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def joined(rank, world_size, spec):
    """Steps with more inputs on one rank than on the other."""
    torch.cuda.set_device(0)
    ddp, _ = ddp_of(Net().cuda(), spec, own=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with Join([ddp]):
        for step in range(3 + 2 * rank):
            ddp(torch.full((4, 32), 0.1 * step + rank, device="cuda"), 0).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in ddp.parameters()]


@pytest.mark.parametrize("spec", ["none", "bf16", "topk:ratio=0.1"])
def test_ranks_with_uneven_inputs_come_to_the_same_parameters(ranks, spec):
    first, second = ranks.run(joined, 2, spec, timeout=200)
    assert all(map(torch.equal, first, second))
    assert all(parameter.isfinite().all() for parameter in first)


def without_cupy(rank, world_size, spec):
    """A training by Triton's kernels, and one by torch's operators."""
    found = []
    for backends in ("triton,reference", "reference"):
        with kernels.use_backend(*backends.split(",")):
            found.append(compressed(rank, world_size, spec, GENTLE))
    return found


@pytest.mark.parametrize("spec", COMPRESSED)
def test_without_cupy_ours_and_torch_s_train_by_triton_s_kernels(ranks, spec):
    for by_triton, by_torch in ranks.run(without_cupy, 2, spec, timeout=200):
        for found, expected in zip([*by_triton[0], *by_triton[1]], [*by_torch[0], *by_torch[1]], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


class Spread(Given):
    """Every second parameter on another device."""

    def __init__(self, devices):
        super().__init__(SHAPES)
        for index, parameter in enumerate(self.parameters()):
            parameter.data = parameter.data.to(devices[index % 2])

    def forward(self, gradients):
        pairs = zip(self.parameters(), gradients, strict=True)
        return sum((parameter * gradient.to(parameter.device)).sum().cpu() for parameter, gradient in pairs)


def on_devices(rank, world_size, spec, devices):
    """The averages of some steps, on the CPU."""
    ddp = gradwire.DistributedDataParallel(Spread(devices), compressor=spec)
    steps = [average(ddp, gradients(rank, step, SHAPES)) for step in range(3)]
    return [{name: numbers.cpu() for name, numbers in step.items()} for step in steps]


def on_two_devices(rank, world_size, spec):
    return on_devices(rank, world_size, spec, ("cuda:0", "cuda:1")), on_devices(rank, world_size, spec, ("cpu", "cpu"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("spec", ["none", "powersgd:rank=2"])
def test_a_model_on_two_devices_is_averaged_as_on_the_cpu(ranks, spec):
    for on_gpus, on_cpu in ranks.run(on_two_devices, 2, spec, timeout=200):
        for found, expected in zip(on_gpus, on_cpu, strict=True):
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-3)
