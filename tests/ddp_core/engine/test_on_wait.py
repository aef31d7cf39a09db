"""Tasks that whoever waits for them runs, as plain sums are: what they give, what they cost, and how they fail."""

import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.compress import AllReduce, Traffic
from gradwire.ddp_core import Engine, Link, Paced, ProcessGroup
from gradwire.ddp_core.engine.lanes import Task

from ..nets import ALWAYS, Batch, Net, loss_of

CPU, LIMIT = torch.device("cpu"), timedelta(seconds=20)
NUMEL = 1000
COST = Traffic(rounds=1, payload_bytes=4 * NUMEL, sent_bytes=4.0 * NUMEL)


def ranks_numbers(rank, seed):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * seed + rank))


def engine_of(rounds=1, limit=LIMIT):
    engine = Engine(ProcessGroup(dist.group.WORLD, CPU, limit), CPU, limit)
    engine.prepare(rounds)
    return engine


def once(tensor):
    return (yield AllReduce(tensor, "sum"))


def twice(tensor):
    """A program that asks for two sums, one after the other."""
    yield AllReduce(tensor, "sum")
    return (yield AllReduce(tensor.clone(), "sum"))


def run_by_those_who_wait(rank, world_size):
    """What is added up by tasks of one round and of two; then by one beside backward."""
    engine, pendings = engine_of(2), []
    for seed in range(7):
        program = twice if seed % 2 else once
        pendings.append(engine.submit(Task(program(ranks_numbers(rank, seed)), "a sum"), on_wait=True))
    answers = [pending.wait(LIMIT) for pending in pendings]
    answers.append(engine.submit(Task(twice(ranks_numbers(rank, 7)), "a program")).wait(LIMIT))
    engine.close()
    return answers


def test_tasks_run_by_those_who_wait_give_what_others_give(ranks):
    world_size = 3
    for results in ranks.run(run_by_those_who_wait, world_size):
        for seed, result in enumerate(results):
            expected = sum(ranks_numbers(rank, seed).double() for rank in range(world_size))
            torch.testing.assert_close(result.double(), expected * (world_size if seed % 2 else 1), rtol=0, atol=1e-5)


def record_of_a_sum(rank, world_size):
    engine, tasks, begin = engine_of(), [Task(once(torch.ones(NUMEL)), "a sum") for _ in range(2)], time.perf_counter()
    engine.submit(tasks[0], on_wait=True).wait(LIMIT)
    between = time.perf_counter() - begin
    late = engine.submit(tasks[1], on_wait=True)
    while tasks[1]._pending.arrived is None:
        time.sleep(0.001)
    there = time.perf_counter()
    time.sleep(0.01)
    late.wait(LIMIT)
    engine.close()
    return tasks[0].record, between, tasks[1].record, there


def test_a_sum_is_timed_until_it_is_there_and_not_until_somebody_asks(ranks):
    for record, between, late, there in ranks.run(record_of_a_sum, 2):
        assert record.traffic == COST
        _, (kind, begin, end) = record.spans
        assert kind == "wait"
        assert end - begin == pytest.approx(record.wait)
        assert record.wait <= between
        assert late.spans[-1][2] <= there


def without_an_answer(rank, world_size):
    """Rank 0 waits for a sum that rank 1 never begins; what it raises, and what the engine says then."""
    engine, said = engine_of(limit=timedelta(seconds=2)), []
    if rank == 0:
        pendings = [engine.submit(Task(once(torch.ones(NUMEL)), f"bucket {index}"), on_wait=True) for index in range(2)]
        for pending in pendings:
            with pytest.raises(RuntimeError) as caught:
                pending.wait(timedelta(seconds=2))
            said.append(str(caught.value))
        with pytest.raises(RuntimeError) as caught:
            engine.submit(Task(once(torch.ones(NUMEL)), "bucket 2"), on_wait=True)
        said.append(str(caught.value))
    dist.barrier()
    engine.close()
    return said, engine._failure is not None


def test_a_sum_that_nobody_answers_fails_with_its_label_and_ends_the_engine(ranks):
    (said, failed), (_, fine) = ranks.run(without_an_answer, 2)
    assert failed
    assert not fine
    assert len(said) == 3
    assert all("bucket 0: " in message for message in said)
    assert "reduces no more gradients" in said[2]


def dropped_at_close(rank, world_size):
    engine = engine_of()
    pending = engine.submit(Task(once(torch.ones(NUMEL)), "a sum"), on_wait=True)
    dist.barrier()
    engine.close()
    with suppress(AssertionError):
        with pytest.raises(RuntimeError) as caught:
            pending.wait(LIMIT)
        return str(caught.value)


def test_a_sum_that_nobody_waited_for_is_given_up_when_the_engine_closes(ranks):
    assert all("a sum: RuntimeError: it was given up" in said for said in ranks.run(dropped_at_close, 2))


def spans_and_traffic(rank, world_size, paced):
    """The kinds of spans of a step without compression, what it cost, and the bytes of all gradients."""
    transport = (lambda inner: Paced(inner, Link(1e9))) if paced else None
    model = gradwire.DistributedDataParallel(Net(ALWAYS[:3]), bucket_cap_mb=0.001, transport=transport)
    for step in range(2):
        loss_of(model(Batch.drawn(rank, step))).backward()
    kinds = {kind for bucket in model.last_step().buckets for kind, _, _ in bucket.spans}
    cost, size = model.compression.stats().last.traffic, sum(parameter.nbytes for parameter in model.parameters())
    model.compression.close()
    return kinds, cost, size


@pytest.mark.parametrize("paced", [False, True])
def test_buckets_without_compression_have_nothing_to_decode_and_cost_a_ring(ranks, paced):
    for kinds, cost, size in ranks.run(spans_and_traffic, 3, paced):
        assert kinds == {"encode", "wait"}
        assert cost.payload_bytes == size
        assert cost.sent_bytes == pytest.approx(size * 2 * 2 / 3)  # of a ring of three


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
