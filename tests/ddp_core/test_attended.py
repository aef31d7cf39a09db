"""Programs whose waiter does what comes after the first request."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.compress import AllReduce
from gradwire.ddp_core import Engine

LIMIT = timedelta(seconds=20)


def summed(tensor, threads, error=None):
    """The sum over ranks; notes which thread goes on with it."""
    total = yield AllReduce(tensor, "sum")
    threads.append(threading.current_thread().name)
    if error is not None:
        raise error
    return total


def engine_of(rounds=1):
    engine = Engine(dist.group.WORLD, torch.device("cpu"), LIMIT)
    engine.prepare(rounds)
    return engine


def attended(rank, world_size):
    """The sums of three buckets, waited for in their order; the threads that ended them; rounds in the records."""
    engine, threads, sent = engine_of(), [], []
    for index in range(3):
        sent.append(engine.submit(summed(torch.full((4,), index + 1.0), threads), "", at_once=True, attended=True))
    sums = [result.wait().tolist() for result, _ in sent]
    again = sent[0][0].wait().tolist()
    engine.close()
    return sums, again, threads, [record.traffic.rounds for _, record in sent]


def test_results_are_taken_in_order_by_the_thread_that_waits(ranks):
    for sums, again, threads, rounds in ranks.run(attended, 2):
        assert sums == [[2.0] * 4, [4.0] * 4, [6.0] * 4]
        assert again == sums[0]
        assert set(threads) == {"MainThread"}
        assert rounds == [1, 1, 1]


def noted(rank, world_size):
    """Whether the record of a bucket that has arrived tells of it once the next one is sent."""
    engine = engine_of()
    _, record = engine.submit(summed(torch.ones(4), []), "", at_once=True, attended=True)
    deadline = time.monotonic() + LIMIT.total_seconds()
    while not engine._executor._left[0].arrived and time.monotonic() < deadline:
        time.sleep(0.01)
    before = record.wait
    last, _ = engine.submit(summed(torch.ones(4), []), "", at_once=True, attended=True)
    told = before == 0.0 < record.wait
    last.wait()
    engine.close()
    return told


def test_what_has_arrived_is_noted_when_the_next_bucket_leaves(ranks):
    assert all(ranks.run(noted, 2))


def failed(rank, world_size):
    """What three waiters are told where the second program raises."""
    engine, messages = engine_of(), []
    errors = (None, ArithmeticError("on purpose"), None)
    sent = [
        engine.submit(summed(torch.ones(4), [], error), f"bucket {index}", at_once=True, attended=True)[0]
        for index, error in enumerate(errors)
    ]
    for result in sent:
        try:
            result.wait()
        except RuntimeError as error:
            messages.append(str(error))
    engine.close()
    return messages


def test_an_error_reaches_all_who_wait_from_there_on(ranks):
    for messages in ranks.run(failed, 2):
        assert len(messages) == 2
        assert all("bucket 1" in message and "on purpose" in message for message in messages)


def unattended(rank, world_size):
    """Seconds that closing takes where nobody waits for a bucket whose other half never comes."""
    engine = engine_of()
    if rank == 0:
        engine.submit(summed(torch.ones(4), []), "", at_once=True, attended=True)
    begin = time.monotonic()
    engine.close()
    return time.monotonic() - begin


def test_an_engine_is_closed_though_nobody_waits_for_what_it_sent(ranks):
    assert max(ranks.run(unattended, 2)) < LIMIT.total_seconds() / 2


def averaged(rank, world_size):
    """The spans of the last step, and its gradient."""
    model = gradwire.DistributedDataParallel(torch.nn.Linear(4, 4, bias=False), bucket_cap_mb=1e-6)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
    spans = [kind for bucket in model.last_step().buckets for kind, _, _ in bucket.spans]
    gradient = model.module.weight.grad.clone()
    model.compression.close()
    return spans, gradient


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_model_without_compression_is_averaged_so(ranks, world_size):
    for spans, gradient in ranks.run(averaged, world_size):
        assert spans == ["encode", "wait", "decode"]
        torch.testing.assert_close(gradient, torch.full((4, 4), (world_size + 1) / 2))
