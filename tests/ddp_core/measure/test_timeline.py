"""The timeline of our DistributedDataParallel: what its numbers say of a step, and the file for a timeline viewer."""

import time

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import gradwire

from ..layers import CAP, Layers, inputs_of

ALL = (0, 1, 2, 3)
NAMES = {name for name, _ in Layers().named_parameters()}
DELAY = 0.2  # seconds


def step(model, rank=0, number=0, used=ALL):
    loss = model(inputs_of(rank, number), used).square().sum()
    loss.backward()
    return model.last_step()


def check(times):
    """The order of events that holds in every step."""
    assert times.forward > 0
    assert times.backward > 0
    assert times.exposed > 0
    launches = [bucket.launched for bucket in times.buckets]
    assert launches == sorted(launches)
    for bucket in times.buckets:
        assert times.forward <= bucket.ready <= bucket.launched <= bucket.done <= times.total
        moments = [moment for _, begin, end in bucket.spans for moment in (begin, end)]
        assert moments == sorted(moments)
        assert all(bucket.launched <= moment <= bucket.done for moment in moments)
        assert bool(moments) == (bucket.spans != ())
    return times


def kinds(bucket):
    return [kind for kind, _, _ in bucket.spans]


def compressed(rank, world_size):
    model = gradwire.DistributedDataParallel(Layers(), compressor="powersgd:rank=1", bucket_cap_mb=CAP)
    before = model.last_step()
    return before, [step(model, rank, number) for number in range(4)]


def test_every_step_has_its_buckets_in_order_with_the_spans_of_their_programs(ranks):
    for before, steps in ranks.run(compressed, 2):
        assert before is None
        assert [times.step for times in steps] == [1, 2, 3, 4]
        for times in map(check, steps):
            assert [bucket.index for bucket in times.buckets] == list(range(4))
            assert {name for bucket in times.buckets for name in bucket.parameters} == NAMES
            assert [kinds(bucket) for bucket in times.buckets] == [["encode", *["wait", "decode"] * 2]] * 4


def beside_a_slow_rank(rank, world_size):
    """Rank 1 computes layer 1's gradients late, while rank 0 waits; autograd reaches layers from the last to the first."""
    model = gradwire.DistributedDataParallel(Layers(), bucket_cap_mb=CAP)
    for number in range(3):
        step(model, rank, number)
    average_of, waits = model.reducer.average_of, []

    def computes_long(_):
        torch.distributed.barrier()
        time.sleep(DELAY)

    def waited_for(*given):
        if not waits:
            torch.distributed.barrier()
        waits.append(given)
        return average_of(*given)

    if rank == 1:
        model.module.layers[1].bias.register_hook(computes_long)
    else:
        model.reducer.average_of = waited_for
    return step(model, rank, 3)


def test_a_rank_that_waits_for_a_slower_one_has_that_time_exposed_and_the_slower_one_in_its_backward(ranks):
    waiting, late = ranks.run(beside_a_slow_rank, 2)
    assert check(waiting).exposed > DELAY
    assert check(late).backward > DELAY
    bucket = next(bucket for bucket in late.buckets if "layers.1.bias" in bucket.parameters)
    assert bucket.ready > DELAY
    assert any(each.done - each.launched > DELAY for each in waiting.buckets)


def with_hooks(rank, world_size):
    """One step with a hook of torch, one with a hook of ours, and one whose hook returns no torch future."""

    class Waited:
        def __init__(self, work, tensor):
            self.work, self.tensor = work, tensor

        def wait(self):
            self.work.wait()
            return self.tensor.div_(world_size)

    def own(state, bucket):
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
        return Waited(work, bucket.buffer())

    answers = []
    for register in (
        lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
        lambda model: gradwire.attach(model, "fp16"),
        lambda model: model.register_comm_hook(None, own),
    ):
        model = gradwire.DistributedDataParallel(Layers(), bucket_cap_mb=CAP)
        handle = register(model)
        answers.append([step(model, rank, number) for number in range(2)][-1])
        if handle is not None:
            handle.close()
    return answers


def test_hooks_have_their_buckets_timed_and_ours_their_programs_too(ranks):
    for answers in ranks.run(with_hooks, 2):
        theirs, ours, own = map(check, answers)
        assert [kinds(bucket) for bucket in theirs.buckets + own.buckets] == [[]] * 8
        assert [kinds(bucket) for bucket in ours.buckets] == [["encode", "wait", "decode"]] * 4


def alone(rank, world_size, show, *arguments):
    """`show(model, ...)` of a model on one rank."""
    return show(gradwire.DistributedDataParallel(Layers(), bucket_cap_mb=CAP), *arguments)


def raised_before_the_first_gradient(model):
    step(model)
    loss = model(inputs_of(0), ALL).sum()
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert model.last_step().step == 1
    return check(step(model)).step


def test_after_a_backward_that_raised_at_once_the_timeline_goes_on(ranks):
    assert ranks.run(alone, 1, raised_before_the_first_gradient) == [2]


def accumulated(model):
    step(model)
    with model.no_sync():
        step(model)
        assert model.last_step().step == 1
    with torch.no_grad():
        model(inputs_of(0), ALL)
    began = time.perf_counter()
    output = model(inputs_of(0), ALL)
    forward = time.perf_counter() - began
    with torch.no_grad():
        time.sleep(DELAY)
        model(inputs_of(0), ALL)
    output.sum().backward()
    return check(model.last_step()), forward


def test_only_synchronized_steps_count_from_the_forward_that_they_belong_to(ranks):
    [(times, forward)] = ranks.run(alone, 1, accumulated)
    assert times.step == 2
    assert times.forward < forward
    assert times.backward > DELAY


def computing_on(model):
    """A step whose backward goes on in front of the model, seconds of the whole backward, and when it went on so."""
    moments = []

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, grad):
            moments.append(time.perf_counter())
            time.sleep(DELAY)
            moments.append(time.perf_counter())
            return grad

    step(model)
    loss = model(Slow.apply(inputs_of(0)), ALL).sum()
    began = time.perf_counter()
    loss.backward()
    return check(model.last_step()), time.perf_counter() - began, moments


def test_what_backward_computes_after_the_last_gradient_is_not_exposed_communication(ranks):
    [(times, seconds, (begin, end))] = ranks.run(alone, 1, computing_on)
    assert times.backward > DELAY
    assert times.exposed < seconds - (end - begin)
    assert all(times.began + bucket.done < end for bucket in times.buckets)
