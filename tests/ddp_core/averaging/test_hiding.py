"""Time decides how exactly buckets are sent: by the seconds of steps, on rank 0 alone; and on real ranks all follow."""

import copy

import torch

import gradwire
from gradwire.compress import Layout, compressor
from gradwire.ddp_core.averaging.hiding import STEPS, Hiding, hiding_of
from gradwire.ddp_core.measure.record import Record
from gradwire.ddp_core.measure.step import BucketStats, Step
from gradwire.ddp_core.memory.bucket_memory import BucketMemory

from ..chain import SMALL, Chain, inputs_of

SIZE, COUNT = 1000, 3
DENSE = 4.0 * SIZE  # bytes that a rank of two sends of a bucket in a ring


def buckets(rank=0, spec="adaptive:budget=0.02,ladder=none/int8/int4"):
    """Buckets that int4 is good enough for."""
    found = {}
    for index in range(COUNT):
        layout = Layout((f"p{index}",), ((SIZE,),), torch.float32, torch.device("cpu"), 2, rank)
        memory = BucketMemory(compressor(spec), layout, 0)
        memory.choice.flat.copy_(torch.tensor([1.0, 1.0, 1.0, 2.0]))
        found[layout.names] = memory
    return found


def step(began, ready, rate, sent=DENSE, encode=0.0):
    """A step whose buckets are ready at these seconds and then go over a link of so many bytes a second."""
    programs, free = [], 0.0
    for index, at in enumerate(ready):
        begins = began + at
        free = max(free, begins + encode) + sent / rate
        spans = [("encode", begins, begins + encode), ("wait", free - sent / rate, free)]
        record = Record([("all", int(sent), sent), ("host", 9, 1e9)], spans)
        programs.append(BucketStats((f"p{index}",), SIZE, record))
    return Step(programs=programs), free


def proposals(rate, ready=(1.0, 2.0, 3.0), rank=0, steps=4, **options):
    watched, hiding, end = buckets(rank), Hiding(), 100.0
    hiding.check(Step(), 3, watched.items())
    for number in range(4, 4 + steps):
        last, end = step(end, ready, rate, **options)
        hiding.check(last, number, watched.items())
    hiding.check(step(end, ready, rate, **options)[0], 24, watched.items())
    return [memory.choice.proposed for memory in watched.values()]


def test_what_hides_is_sent_exactly_and_what_does_not_as_it_is_good_enough():
    assert proposals(rate=DENSE / 0.01) == [0, 0, 0]
    assert proposals(rate=DENSE / 100) == [2, 2, 2]
    assert proposals(rate=DENSE / 0.5) == [0, 0, 2]


def test_arithmetic_that_takes_longer_than_the_bytes_that_it_saves_is_spared():
    assert proposals(rate=DENSE / 0.5, encode=2.0) == [0, 0, 0]


def test_only_rank_0_proposes_and_nothing_before_there_are_two_steps():
    assert proposals(rate=DENSE, rank=1) == [None] * COUNT
    assert proposals(rate=DENSE, steps=0) == [None] * COUNT


def test_one_step_that_took_long_changes_nothing():
    watched, hiding, end = buckets(), Hiding(), 0.0
    for number in range(3, 3 + STEPS):
        last, end = step(end, (1.0, 2.0, 3.0), DENSE / (100.0 if number == 7 else 0.01))
        hiding.check(last, 24 if number == 2 + STEPS else 9, watched.items())
    assert [memory.choice.proposed for memory in watched.values()] == [0] * COUNT


def test_times_are_watched_where_there_is_a_budget_and_only_there():
    assert hiding_of(compressor("adaptive")) is None
    assert hiding_of(compressor("int8")) is None
    assert isinstance(hiding_of(compressor("adaptive:budget=0")), Hiding)


PATIENT = "adaptive:budget=1e9,ladder=none/int8/int4"  # seconds do not matter: all can be sent exactly


def trained(model, rank, steps, bad=()):
    """Averages and bytes of each step; gradients of some are not finite."""
    averages, sent = [], []
    for number in steps:
        model.zero_grad()
        loss = model(inputs_of(rank, number)).square().sum()
        (loss * (torch.inf if number in bad else 1)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad.nan_to_num(0, 0, 0), alpha=0.05)
        averages += [parameter.grad.clone() for parameter in model.parameters()]
        sent.append(model.compression.stats().last.traffic.payload_bytes)
    return averages, sent


def on_ranks(rank, world_size):
    model, again, bad = (gradwire.DistributedDataParallel(Chain(), compressor=PATIENT, **SMALL) for _ in range(3))
    began = trained(model, rank, range(4))
    weights, state = copy.deepcopy((model.state_dict(), model.compression.state_dict()))
    went_on = trained(model, rank, range(4, 8))
    trained(again, rank, range(1))
    again.load_state_dict(weights)
    again.compression.load_state_dict(state)
    resumed = trained(again, rank, range(4, 8))
    overflowed = trained(bad, rank, range(5), bad=[2])[1]
    for each in (model, again, bad):
        each.compression.close()
    return began, went_on, resumed, overflowed


def test_ranks_change_at_one_step_a_resumed_run_goes_on_in_the_same_bits_and_overflow_changes_nothing(ranks):
    answers = ranks.run(on_ranks, 2)
    dense = sum(parameter.numel() for parameter in Chain().parameters()) * 4
    for began, went_on, resumed, overflowed in answers:
        assert began[1][1] < dense / 2  # the first steps by int4
        assert began[1][3] == dense  # from the step after the first look at times on
        assert went_on[1] == resumed[1]
        assert all(map(torch.equal, went_on[0], resumed[0]))
        assert overflowed[3] == overflowed[1]
        assert all(map(torch.equal, went_on[0], answers[0][1][0]))
        assert (began[1], overflowed) == (answers[0][0][1], answers[0][3])
