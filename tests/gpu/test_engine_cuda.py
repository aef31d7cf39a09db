"""The engine on CUDA: a side stream, on which programs wait for gradients and are waited for, with no wait of the host."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.compress import AllReduce, Layout, Ranks, Simulation
from gradwire.ddp_core import Engine, ProcessGroup
from gradwire.ddp_core.engine.lanes import Task

from ..hooks.given import Given, average, gradients
from ..hooks.test_simulator_agrees import SHAPES, STEPS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SPECS = ["none", "fp16", "bf16", "topk:ratio=0.1", "onebit:block=64", "powersgd:rank=2", "powersgd:rank=1,start_iter=2"]
SPECS += ["int4:block=64,rounding=stochastic", "fp16+powersgd:rank=1", "powersgd:rank=2,power_iterations=2"]
SPECS += [
    "acp-powersgd:rank=2",
    "int4:core=2",
    "batched-powersgd:rank=2",
    "randomk:ratio=0.1,block=16",
    "adacomp:bin=50",
]
SPECS += ["chunktopk:ratio=0.1,chunk=16", "dropping:ratio=0.1,sample=0.5", "topk:ratio=0.1,value_dtype=fp16"]
SPECS += ["hosts:ranks=1+topk:ratio=0.1"]
ROUNDED = ["int8", "int4", "int2", "ternary", "onebit", "natural", "qsgd", "terngrad"]
ROUNDED += ["int8:rounding=stochastic", "int4:rotate=true", "powersgd:rank=2,payload=int4"]
OTHER_BASES = 1.5  # of what rounding loses, where backends round other bases of the same space
ROUNDED += ["adaptive:ladder=none/int4,target=0"]  # always the last of its ladder
needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="torch was built without NCCL")
MOST = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
IN_FP16 = 5e-3  # a unit in the last place of payloads up to 8
FEW = 0.3  # of what rounding loses: about ten codes of a thousand elements
LIMIT = timedelta(seconds=60)
SLEEP = 1 << 30  # cycles: half a second or so, in which the host gets far ahead


def engine_of(rank):
    device = torch.device("cuda", 0)
    engine = Engine(ProcessGroup(nccl(rank), device, LIMIT), device, LIMIT)
    engine.prepare(1)
    return engine


def submitted(engine, program, index=0):
    return engine.submit(Task(program, f"bucket {index}"))


def nccl(rank):
    """A group of this rank alone; the ranks' default group is Gloo's."""
    torch.cuda.set_device(0)
    return dist.new_group([rank], backend="nccl")


def train(rank, group, spec, dtypes, device="cuda", **settings):
    """By dtype: the averages of each step on this rank's GPU, and the buckets."""
    settings = {"bucket_cap_mb": 0.001, "find_unused_parameters": True, **settings}
    runs = {}
    for dtype in dtypes:
        ddp = torch.nn.parallel.DistributedDataParallel(
            Given(SHAPES, dtype).to(device), process_group=group, **settings
        )
        handle = gradwire.attach(ddp, spec)
        given = [[each.to(device) for each in gradients(rank, step, SHAPES, dtype)] for step in range(STEPS)]
        steps = [average(ddp, each) for each in given]
        on_cpu = [{name: numbers.cpu() for name, numbers in step.items()} for step in steps]
        runs[dtype] = on_cpu, [bucket.parameters for bucket in handle.stats().buckets]
        handle.close()
    return runs


def train_with_gloo(rank, world_size, spec, dtypes, **settings):
    torch.cuda.set_device(0)
    return train(rank, dist.group.WORLD, spec, dtypes, **settings)


def train_with_nccl(rank, world_size, spec, dtypes, **settings):
    return train(rank, nccl(rank), spec, dtypes, **settings)


def simulated(spec, names, world_size, dtype):
    """The averages {name: flat} of each step of a bucket, on the CPU."""
    shapes = {f"p{index}": shape for index, shape in enumerate(SHAPES)}
    layout = Layout(names, tuple(map(shapes.get, names)), dtype, torch.device("cpu"), Ranks(world_size))
    simulation, averages = Simulation(gradwire.compressor(spec), layout), []
    for step in range(STEPS):
        given = [dict(zip(shapes, gradients(rank, step, SHAPES, dtype), strict=True)) for rank in range(world_size)]
        flat = simulation.step([torch.cat([numbers[name].view(-1) for name in names]) for numbers in given])[0]
        averages.append(layout.views(flat))
    return averages


def compared(run, spec, world_size, dtype):
    """Of each step all averages of a rank, in one row, and those of the simulator."""
    averages, buckets = run
    expected = [{} for _ in range(STEPS)]
    for names in buckets:
        for step, numbers in zip(expected, simulated(spec, names, world_size, dtype), strict=True):
            step.update(numbers)
    return [(flat(found), flat(meant)) for found, meant in zip(averages, expected, strict=True)]


def flat(named):
    return torch.cat([named[name].reshape(-1).float() for name in sorted(named)])


def exact_means(world_size, dtype):
    """What ranks that lose nothing would average in each step."""
    steps = [[gradients(rank, step, SHAPES, dtype) for rank in range(world_size)] for step in range(STEPS)]
    return [
        sum(torch.cat([each.reshape(-1).float() for each in rank]) for rank in ranks) / world_size for ranks in steps
    ]


BACKENDS = pytest.mark.parametrize(
    ("run", "world_size"),
    [(train_with_gloo, 2), pytest.param(train_with_nccl, 1, marks=needs_nccl)],
    ids=["gloo", "nccl"],
)


@BACKENDS
@pytest.mark.parametrize("spec", SPECS)
def test_ranks_on_a_gpu_compute_what_the_simulator_says_on_the_cpu(ranks, run, world_size, spec):
    """But for a unit or two in the last place of what has 16 bits: numbers up to 4, or payloads."""
    for runs in ranks.run(run, world_size, spec, MOST, timeout=200):
        for dtype, most in MOST.items():
            assert len(runs[dtype][1]) > 1
            most = max(most, IN_FP16) if "fp16" in spec else most
            for found, expected in compared(runs[dtype], spec, world_size, dtype):
                torch.testing.assert_close(found, expected, rtol=0, atol=most, msg=lambda m, d=dtype: f"{d}: {m}")


@BACKENDS
def test_what_dgc_sends_on_a_gpu_is_what_the_simulator_says_on_the_cpu(ranks, run, world_size):
    """In one bucket, since DDP fills several anew after the first step; of float32, in which no two elements are equal."""
    settings = {"find_unused_parameters": False, "bucket_cap_mb": 25}
    for runs in ranks.run(run, world_size, "dgc:ratio=0.1", [torch.float32], **settings, timeout=200):
        for found, expected in compared(runs[torch.float32], "dgc:ratio=0.1", world_size, torch.float32):
            torch.testing.assert_close(found, expected, rtol=0, atol=MOST[torch.float32])


@BACKENDS
@pytest.mark.parametrize("spec", ROUNDED)
def test_ranks_on_a_gpu_round_as_the_simulator_does_on_the_cpu(ranks, run, world_size, spec):
    """A last bit decides about a number between two codes. Another scale or random number costs what rounding loses."""
    for runs in ranks.run(run, world_size, spec, MOST, timeout=200):
        for dtype in MOST:
            steps = zip(compared(runs[dtype], spec, world_size, dtype), exact_means(world_size, dtype), strict=True)
            for step, ((found, expected), exact) in enumerate(steps):
                most = OTHER_BASES if "powersgd" in spec else FEW
                assert (found - expected).norm() <= most * (expected - exact).norm(), (dtype, step)


def doubled(tensor):
    """A collective, then arithmetic that takes its time."""
    total = yield AllReduce(tensor)
    torch.cuda._sleep(SLEEP)
    return total.mul_(2)


def late(tensor):
    """Arithmetic that takes its time, then a collective."""
    torch.cuda._sleep(SLEEP)
    return (yield AllReduce(tensor.mul(2)))


def failing(tensor):
    yield AllReduce(tensor)
    raise ArithmeticError("on purpose")


def submit_late_gradients(rank, world_size):
    """Gradients that are not there yet when they are submitted, and averages that are used before they are there."""
    engine = engine_of(rank)
    submitted(engine, doubled(torch.ones(8, device="cuda").fill_(1))).wait(LIMIT).add(1)  # loads what comes below
    torch.cuda.synchronize()
    grads = [torch.zeros(100_000, device="cuda") for _ in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    began = time.monotonic()
    futures = []
    for index, grad in enumerate(grads):
        torch.cuda._sleep(SLEEP)
        grad.fill_(index + 1)
        futures.append(submitted(engine, doubled(grad), index))
    results = [future.wait(LIMIT) + 1 for future in futures]
    host = time.monotonic() - began
    busy = not torch.cuda.current_stream().query()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return [result.unique().tolist() for result in results], host, time.monotonic() - began, busy


@needs_nccl
def test_streams_wait_for_gradients_and_averages_and_the_host_does_not(ranks):
    ((results, host, device, busy),) = ranks.run(submit_late_gradients, 1)
    assert results == [[3.0], [5.0], [7.0]]
    assert busy
    assert host < device / 2


def leave_the_backward_stream_free(rank, world_size):
    engine = engine_of(rank)
    submitted(engine, doubled(torch.ones(8, device="cuda"))).wait(LIMIT)
    torch.cuda.synchronize()
    future = submitted(engine, late(torch.ones(8, device="cuda")), 1)
    torch.cuda.current_stream().synchronize()
    busy = not engine._beside._stream.query()
    return busy, future.wait(LIMIT).tolist()


@needs_nccl
def test_the_backward_stream_is_not_held_up_by_a_program(ranks):
    assert ranks.run(leave_the_backward_stream_free, 1) == [(True, [2.0] * 8)]


def fail_on_the_side_stream(rank, world_size):
    engine = engine_of(rank)
    future = submitted(engine, failing(torch.ones(8, device="cuda")))
    messages = []
    for call in (lambda: future.wait(LIMIT), lambda: submitted(engine, doubled(torch.ones(8, device="cuda")), 1)):
        with pytest.raises(RuntimeError) as raised:
            call()
        messages.append(str(raised.value))
    return messages


@needs_nccl
def test_a_program_that_fails_fails_its_future_and_the_engine_says_so(ranks):
    for message in ranks.run(fail_on_the_side_stream, 1)[0]:
        assert "on purpose" in message
        assert "bucket 0" in message
