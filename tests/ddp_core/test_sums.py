"""Plain sums, which take no program: what they give, what they cost, and how they fail."""

import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.compress import AllReduce
from gradwire.compress.simulate import Traffic
from gradwire.ddp_core import Engine, pacing
from gradwire.ddp_core.engine.sums import Sum

from .nets import ALWAYS, Batch, Net, loss_of

LIMIT = timedelta(seconds=20)
NUMEL = 1000
COST = Traffic(rounds=1, payload_bytes=4 * NUMEL, sent_bytes=4.0 * NUMEL)


def ranks_numbers(rank, seed):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * seed + rank))


def engine_of(rounds=1):
    engine = Engine(dist.group.WORLD, torch.device("cpu"), LIMIT)
    engine.prepare(rounds)
    return engine


def once(tensor):
    return (yield AllReduce(tensor, "sum"))


def twice(tensor):
    """A program that asks for two sums, one after the other."""
    yield AllReduce(tensor, "sum")
    return (yield AllReduce(tensor.clone(), "sum"))


def sums_among_programs(rank, world_size):
    """What is added up when what needs no program comes after what does; the last one comes alone."""
    engine, results = engine_of(2), []
    for seed in range(7):
        tensor = ranks_numbers(rank, seed)
        if seed == 6:
            engine.rest(time.monotonic() + LIMIT.total_seconds())
        plain = engine.sum(tensor, tensor, COST, lambda: "a sum") if seed % 2 or seed == 6 else None
        results.append(plain or engine.submit(once(tensor) if seed % 2 else twice(tensor), "a program")[0])
    answers = [each.wait() for each in results]
    engine.close()
    return answers, isinstance(results[-1], Sum)


def test_sums_keep_their_order_among_programs_whether_they_can_leave_at_once_or_not(ranks):
    world_size = 3
    for results, alone in ranks.run(sums_among_programs, world_size):
        assert alone
        for seed, result in enumerate(results):
            expected = sum(ranks_numbers(rank, seed).double() for rank in range(world_size))
            times = 1 if seed % 2 or seed == 6 else world_size
            torch.testing.assert_close(result.double(), expected * times, rtol=0, atol=1e-5)


def record_of_a_sum(rank, world_size):
    engine = engine_of()
    tensor, begin = torch.ones(NUMEL), time.perf_counter()
    started = engine.sum(tensor, tensor, COST, lambda: "a sum")
    started.wait()
    between = time.perf_counter() - begin
    time.sleep(0.3)  # nobody waits for this
    late = engine.sum(tensor, tensor, COST, lambda: "a sum")
    time.sleep(0.5)
    late.wait()
    engine.close()
    return started.record, between, late.record


def test_a_sum_is_timed_until_it_is_there_and_not_until_somebody_asks(ranks):
    for record, between, late in ranks.run(record_of_a_sum, 2):
        assert record.traffic == COST
        ((kind, begin, end),) = record.spans
        assert kind == "wait"
        assert end - begin == record.wait <= between
        assert late.wait < 0.5


def without_an_answer(rank, world_size):
    """Rank 0 waits for a sum that rank 1 never begins; what it raises, and what the engine says then."""
    engine = Engine(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=2))
    engine.prepare(1)
    said = []
    if rank == 0:
        tensor = torch.ones(NUMEL)
        first, second = (engine.sum(tensor, tensor, COST, partial("bucket {}".format, index)) for index in range(2))
        for call in (first.wait, second.wait, partial(engine.sum, tensor, tensor, COST, str)):
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))
    dist.barrier()
    engine.close()
    return said, engine.failed


def test_a_sum_that_nobody_answers_fails_with_its_label_and_ends_the_engine(ranks):
    (said, failed), (_, fine) = ranks.run(without_an_answer, 2)
    assert failed
    assert not fine
    assert len(said) == 3
    assert all("bucket 0: " in message for message in said)
    assert "reduces no more gradients" in said[2]


def dropped_at_close(rank, world_size):
    engine = engine_of()
    tensor = torch.ones(NUMEL)
    started = engine.sum(tensor, tensor, COST, lambda: "a sum")
    dist.barrier()
    engine.close()
    try:
        started.wait()
    except RuntimeError as error:
        return str(error)


def test_a_sum_that_nobody_waited_for_is_given_up_when_the_engine_closes(ranks):
    assert all("a sum: RuntimeError: it was given up" in said for said in ranks.run(dropped_at_close, 2))


def kinds_of_spans(rank, world_size, paced):
    """The kinds of spans of a step without compression."""
    model = gradwire.DistributedDataParallel(Net(ALWAYS[:1]))
    with pacing(lambda work, _: work) if paced else gradwire.trace(model, "/dev/null", rank=rank):
        for step in range(2):
            loss_of(model(Batch.drawn(rank, step))).backward()
    kinds = {kind for bucket in model.last_step().buckets for kind, _, _ in bucket.spans}
    model.compression.close()
    return kinds


def test_buckets_without_compression_are_plain_sums_unless_links_are_paced(ranks):
    assert ranks.run(kinds_of_spans, 2, False) == [{"wait"}] * 2
    assert ranks.run(kinds_of_spans, 2, True) == [{"encode", "wait", "decode"}] * 2


def traffic_of_a_step(rank, world_size):
    """Of a model without compression: by plain sums, and by programs."""
    found = []
    for paced in (False, True):
        model = gradwire.DistributedDataParallel(Net(ALWAYS[:3]), bucket_cap_mb=0.001)
        with pacing(lambda work, _: work) if paced else nullcontext():
            loss_of(model(Batch.drawn(rank, 0))).backward()
        found.append(model.compression.stats().last.traffic)
        model.compression.close()
    return found, sum(parameter.nbytes for parameter in model.parameters())


def test_plain_sums_cost_what_the_programs_cost_that_they_stand_for(ranks):
    for (plain, program), size in ranks.run(traffic_of_a_step, 3):
        assert plain == program
        assert plain.payload_bytes == size
        assert plain.sent_bytes == pytest.approx(size * 2 * 2 / 3)  # of a ring of three


def gradient_kept_in_a_graph(rank, world_size):
    """What autograd says of a graph that needs a gradient which the next step has overwritten."""
    layer = torch.nn.Linear(200, 200, bias=False)  # large: a kernel copies it
    model = gradwire.DistributedDataParallel(layer, gradient_as_bucket_view=True)
    model(torch.ones(2, 200)).sum().backward()
    weight = torch.ones(200, 200, requires_grad=True)
    loss = (weight * layer.weight.grad).sum()
    model.zero_grad()
    model(torch.ones(2, 200)).sum().backward()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    finally:
        model.compression.close()


def test_autograd_notices_that_a_gradient_in_a_bucket_has_changed(ranks):
    assert all("modified by an inplace operation" in said for said in ranks.run(gradient_kept_in_a_graph, 2))
