"""Overlap with the next forward on CUDA: the bits are those without it, an order is planned from events, no host waits."""

import pytest
import torch
from torch import nn

import gradwire
from gradwire.compress import AllReduce
from gradwire.ddp_core import Link, Paced, ProcessGroup
from gradwire.ddp_core.measure.clock import CudaClock
from gradwire.ddp_core.overlap.slice_order import FIRST_UPDATE, MEASURED

from .test_engine_cuda import LIMIT, SLEEP, nccl, needs_nccl

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WIDTH, STEPS = 64, 14
WARM = 3  # steps: kernels are compiled, buckets built anew
RATE = 2e6  # bytes a second of the emulated link


def slow(inner):
    """A transport behind a slow link."""
    return Paced(inner, Link(RATE))


def setting_of(spec, device, order="priority", **options):
    """Layers with a tied weight, and an optimizer, overlapped."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    layers[3].weight = layers[0].weight
    model = gradwire.DistributedDataParallel(layers.to(device), compressor=spec, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, gradwire.overlap(model, optimizer, order=order, slice_mb=0.002)


def trained(rank, spec, device, link, order="priority"):
    """Parameters and momenta after some steps; whether each left updates under way; when ranks looked first; the report."""
    model, optimizer = setting_of(spec, device, order, transport=link)
    inputs = torch.Generator().manual_seed(rank)
    pending = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH, generator=inputs).to(device)).square().mean().backward()
        optimizer.step()
        pending.append(model._overlap.pending)
    report, look = optimizer.report(), model._overlap.order._since + FIRST_UPDATE
    state = optimizer.state_dict()["state"]
    numbers = [*model.state_dict().values(), *(each for fields in state.values() for each in fields.values())]
    model.compression.close()
    return [each.cpu() for each in numbers], pending, look, report


def both(rank, world_size, spec, device, link):
    expected, never, _, _ = trained(rank, spec, device, link, "synchronous")
    found, pending, look, report = trained(rank, spec, device, link)
    return all(map(torch.equal, expected, found)), any(never), pending, look, report


def check(answers):
    """The same bits on each rank, and one order, found after some measured steps."""
    assert len({report.order for *_, report in answers}) == 1
    for same, never, pending, look, report in answers:
        assert same
        assert not never
        assert look < STEPS
        assert all(pending)
        assert 0 < report.bound <= report.synchronous_bound * (1 + 1e-9)
        assert report.exposed >= 0


@pytest.mark.parametrize("link", [None, slow], ids=["no link", "slow link"])
@pytest.mark.parametrize("spec", ["none", "bf16", "int8", "powersgd:rank=2"])
def test_with_overlap_the_same_bits_come_out_and_ranks_find_one_order(ranks, spec, link):
    check(ranks.run(both, 2, spec, "cuda", link, timeout=200))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_events_are_those_of_the_model_s_device_whichever_is_the_current_one(ranks):
    check(ranks.run(both, 2, "bf16", "cuda:1", None, timeout=200))


def under_watch(rank, world_size, spec):
    """Marks that were taken until the end of each step, steps raising where the host waits; the first look; the report."""
    taken, now = [0], CudaClock.now
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CudaClock, "now", lambda clock: taken.append(taken[-1] + 1) or now(clock))
        model, optimizer = setting_of(spec, "cuda", process_group=nccl(rank))
        inputs, marks = torch.randn(8, WIDTH, device="cuda"), []
        for step in range(STEPS):
            torch.cuda.synchronize()
            looks = step <= WARM or step == model._overlap.order._since + FIRST_UPDATE
            torch.cuda.set_sync_debug_mode("default" if looks else "error")
            try:
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            marks.append(taken[-1])
    optimizer.drain()
    report, look = optimizer.report(), model._overlap.order._since + FIRST_UPDATE
    model.compression.close()
    return marks, look, report


@needs_nccl
@pytest.mark.parametrize("spec", ["none", "bf16", "int8", "powersgd:rank=2"])
def test_the_host_waits_in_no_step_and_events_are_recorded_in_those_that_are_measured(ranks, spec):
    ((marks, look, report),) = ranks.run(under_watch, 1, spec, timeout=200)
    grown = [step for step in range(1, STEPS) if marks[step] > marks[step - 1]]
    assert grown == list(range(look - MEASURED, look + 1))  # the forward after the last one, too
    assert report.exposed >= 0
    assert report.bound is None  # one rank sends nothing


def marks_around_work(rank, world_size):
    """Seconds between marks around half a second of work: the host's, and the device's in both directions."""
    clock = CudaClock(torch.device("cuda", 0))
    first = clock.now()
    torch.cuda._sleep(SLEEP)
    second = clock.now()
    return second - first, clock.seconds(first, second), clock.seconds(second, first)


def test_marks_tell_when_the_device_came_to_them(ranks):
    ((host, device, back),) = ranks.run(marks_around_work, 1)
    assert host < device / 2
    assert back == pytest.approx(-device)


def reply_behind_work(rank, world_size):
    """Of a reply behind half a second of work: whether its mark is the device's, its seconds, those of a mark beside it."""
    device = torch.device("cuda", 0)
    transport, clock, side = ProcessGroup(nccl(rank), device, LIMIT), CudaClock(device), torch.cuda.Stream()
    transport.open(1)
    transport.start(AllReduce(torch.ones(8, device=device)), 0).wait(LIMIT)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    before, numbers = clock.now(), torch.ones(8, device=device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        pending = transport.start(AllReduce(numbers), 0)
        pending.expect_late_wait(clock.now)
    noted, beside = pending.arrived, clock.now()
    torch.cuda.set_sync_debug_mode("default")
    pending.wait(LIMIT)
    return clock.took(noted), clock.seconds(before, noted), clock.seconds(before, beside)


@needs_nccl
def test_a_reply_is_noted_when_it_is_there_and_nobody_waits_for_it(ranks):
    ((took, noted, beside),) = ranks.run(reply_behind_work, 1)
    assert took
    assert beside < noted / 2
