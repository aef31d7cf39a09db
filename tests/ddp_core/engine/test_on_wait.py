"""Tasks that whoever waits for them runs, as plain sums are: what they give, and how they end."""

from datetime import timedelta

import torch
import torch.distributed as dist

import gradwire
from gradwire.compress import AllReduce
from gradwire.ddp_core import Engine, ProcessGroup
from gradwire.ddp_core.engine.lanes import Task

from ..errors import message_of

CPU, LIMIT = torch.device("cpu"), timedelta(seconds=20)
NUMEL = 1000


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


def without_an_answer(rank, world_size):
    """Rank 0 waits for a sum that rank 1 never begins; what it raises, and what the engine says then."""
    engine, said = engine_of(limit=timedelta(seconds=2)), []
    if rank == 0:
        pendings = [engine.submit(Task(once(torch.ones(NUMEL)), f"bucket {index}"), on_wait=True) for index in range(2)]
        said += [message_of(pending.wait, timedelta(seconds=2)) for pending in pendings]
        said.append(message_of(engine.submit, Task(once(torch.ones(NUMEL)), "bucket 2"), on_wait=True))
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
    return message_of(pending.wait, LIMIT)


def test_a_sum_that_nobody_waited_for_is_given_up_when_the_engine_closes(ranks):
    assert all("a sum: RuntimeError: it was given up" in said for said in ranks.run(dropped_at_close, 2))


def gradient_kept_in_a_graph(rank, world_size):
    """What autograd says of a graph that needs a gradient which the next step has overwritten."""
    layer = torch.nn.Linear(200, 200, bias=False)  # large: a kernel copies it
    model = gradwire.DistributedDataParallel(layer, gradient_as_bucket_view=True)
    model(torch.ones(2, 200)).sum().backward()
    weight = torch.ones(200, 200, requires_grad=True)
    loss = (weight * layer.weight.grad).sum()
    model.zero_grad()
    model(torch.ones(2, 200)).sum().backward()
    return message_of(loss.backward)


def test_autograd_notices_that_a_gradient_in_a_bucket_has_changed(ranks):
    assert all("modified by an inplace operation" in said for said in ranks.run(gradient_kept_in_a_graph, 2))
