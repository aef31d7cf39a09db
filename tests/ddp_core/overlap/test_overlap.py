"""An overlapped training is, bit for bit, that of the same slices without overlap."""

import copy
import random
import threading
import time
from functools import partial
from itertools import product

import pytest
import torch

from gradwire.ddp_core import Link, Paced
from gradwire.ddp_core.transport.protocol import Decorated

from ...faulty import Fault, faulty
from ..chain import Chain
from .overlapped import RATE, STEPS, Layers, Plain, Setting, equal

COMPRESSORS = {
    "none": 0.004,
    "bf16": 0.004,
    "int8": 0.002,
    "topk:ratio=0.1": 0.002,
    "onebit": 0.0003,
    "powersgd:rank=2": 0.0001,
}
OTHERS = dict.fromkeys(("fp16", "int4", "int2", "ternary", "qsgd", "terngrad", "natural", "chunktopk"), 0.0001)
OTHERS |= dict.fromkeys(("randomk", "dropping", "adacomp", "batched-powersgd:rank=2"), 0.0001)
OTHERS |= {"dgc": 0.00002, "acp-powersgd:rank=2": 0.00002}
CASES = list(product([*COMPRESSORS, *OTHERS], [2, 4]))
QUICK = [*((spec, 2) for spec in COMPRESSORS), ("int8", 4)]
SLOW = [(spec, 2) for spec in OTHERS]
MARKS = {case: pytest.mark.slow if case in SLOW else pytest.mark.thorough for case in CASES if case not in QUICK}


class Sleepy:
    """Sleeps at random, differently on each rank."""

    def __init__(self, rank):
        self._random = random.Random(rank)

    def __call__(self, *_):
        time.sleep(self._random.random() * 0.001)


def trained(rank, order, steps=STEPS, *, shuffled=False, **options):
    setting = Setting(rank, order, **options)
    sleepy, shuffle = Sleepy(rank), random.Random(5)
    for module in setting.model.module.modules():
        module.register_forward_pre_hook(sleepy)
    pending = []
    for _ in range(steps):
        if shuffled and setting.model.reducer.finished > 1:
            order = list(range(len(setting.model.reducer.assignment.sending)))
            setting.model.reducer.assignment.send_in(shuffle.sample(order, len(order)))
        setting.step()
        pending.append(setting.pending)
    return setting.end(), pending, len(setting.model.reducer.assignment.sending)


def compared(rank, world_size, compressor):
    """Whether it is the same without overlap, whether updates were under way after any step, and how many slices.

    A busy machine may send a step's few bytes before the step ends: one step of four that overlaps is enough.
    """
    options = {"compressor": compressor, "slice_mb": (COMPRESSORS | OTHERS)[compressor]}
    expected, never, slices = trained(rank, "synchronous", **options)
    found, pending, others = trained(rank, "priority", shuffled=True, **options)
    assert slices == others
    return equal(expected, found), any(never), any(pending), slices


@pytest.mark.parametrize(
    ("compressor", "world_size"), [pytest.param(*case, marks=MARKS.get(case, ())) for case in CASES]
)
def test_with_overlap_the_same_bits_come_out_in_whatever_order_slices_leave(ranks, compressor, world_size):
    for same, waits, overlaps, slices in ranks.run(compared, world_size, compressor):
        assert same
        assert not waits
        assert overlaps
        assert slices > 1


CUT = {"int8": 0.001, "topk:ratio=0.1": 0.0005}  # the largest layer leaves in several slices


def resumed(rank, world_size, compressor):
    """The end of a training that goes on in the same slices, of one that was never stopped, and how others end."""
    whole = Setting(rank, "priority", compressor=compressor, slice_mb=CUT[compressor])
    for _ in range(3):
        whole.step()
    assert len(whole.model.reducer.assignment.sending) > len(whole.model.reducer.assignment.buckets)
    saved = copy.deepcopy([part.state_dict() for part in (whole.model, whole.optimizer, whole.model.compression)])
    ends = []
    for order, slice_mb in [("priority", CUT[compressor]), ("priority", 2 * CUT[compressor]), (None, None)]:
        again = Setting(rank, order, compressor=compressor, slice_mb=slice_mb)
        for part, state in zip((again.model, again.optimizer, again.model.compression), saved, strict=True):
            part.load_state_dict(state)
        again.generator.set_state(whole.generator.get_state())
        for _ in range(2):
            again.step()
        ends.append(again.end())
    for _ in range(2):
        whole.step()
    same, *others = ends
    return equal(whole.end(), same), [all(bool(each.isfinite().all()) for each in end) for end in others]


@pytest.mark.parametrize("compressor", CUT)
def test_a_state_saved_while_parameters_are_cut_goes_on_in_the_same_bits_and_loads_into_other_slices(ranks, compressor):
    for same, others in ranks.run(resumed, 2, compressor):
        assert same
        assert others == [True, True]


def loaded_where_some_ranks_owe(rank, world_size):
    """Whether the state of this rank owes gradients, and since when each step after its load has its buckets.

    The rank that serves the middle layer serves it in new buckets, too. The others owe what they served, as the first step
    of these buckets does not count.
    """
    net = partial(Chain, 64, 3)  # whose buckets are made anew after the first step
    setting, since = Setting(rank, "priority", net=net, compressor="int4", slice_mb=1.0, link=None), []
    for step in range(6):
        setting.optimizer.zero_grad()
        loss = setting.model(torch.randn(4, 64, generator=setting.generator)).square().mean()
        (loss * float("inf") if step == 1 else loss).backward()
        if step != 1:
            setting.optimizer.step()
            since.append(setting.model._overlap.order._since)
            continue
        setting.optimizer.drain()
        saved = copy.deepcopy(setting.model.compression.state_dict())
        setting.model.compression.load_state_dict(saved)
    setting.end()
    return any("carried_over" in fields for fields in saved["parameters"].values()), since


def test_ranks_that_load_a_state_in_which_some_owe_gradients_have_new_slices_at_the_same_steps(ranks):
    owe, since = zip(*ranks.run(loaded_where_some_ranks_owe, 3), strict=True)
    assert set(owe) == {True, False}
    assert all(each == since[0] for each in since)


def planned_in_mid_run(rank, world_size):
    """Whether a training that is planned twice ends as one that never is, and the orders of sending that it had."""
    expected = trained(rank, "synchronous", steps=18)[0]
    setting, orders = Setting(rank, "priority", link=slower), []
    for step in range(18):
        setting.step()
        orders.append([each.index() for each in setting.model.reducer.assignment.sending])
        if step == 12:
            setting.model._overlap.order._since = 5  # as if these buckets were as many steps old as for a look
    return equal(expected, setting.end()), orders


def test_planning_in_mid_run_changes_the_order_on_all_ranks_and_no_bits(ranks):
    (same, orders), (other_same, other_orders) = ranks.run(planned_in_mid_run, 2)
    assert same
    assert other_same
    assert orders == other_orders
    assert all(sorted(order) == sorted(orders[-1]) for order in orders[2:])
    assert orders[-1] != sorted(orders[-1])  # what forward needs first does not leave last


def disturbed(inner):
    """A transport behind a link, some of whose requests are started late on some ranks."""
    chance = random.Random(inner.group.rank())
    turns = chance.sample(range(5000), 500)
    naps = [Fault("call", inner.group.rank(), turn, action=lambda: time.sleep(0.0005)) for turn in turns]
    return Paced(faulty(*naps)(inner), Link(1e8))


def random_schedules(rank, world_size, schedules, link):
    """Whether parameters are as without overlap after steps that leave in any order, waited for in any order."""
    results = []
    for order in ("synchronous", "priority"):
        setting = Setting(rank, order, net=Layers, link=link, optimizer=torch.optim.SGD, slice_mb=0.001)
        shared, mine = random.Random(1), random.Random(rank)
        parameters = list(setting.model.parameters())
        for step in range(schedules):
            sending = setting.model.reducer.assignment.sending
            if step > 1:
                setting.model.reducer.assignment.send_in(shared.sample(range(len(sending)), len(sending)))
            setting.optimizer.zero_grad()
            setting.loss().backward()
            for parameter in mine.sample(parameters, mine.randrange(3)):
                parameter.grad.sum()
            setting.optimizer.step()
            for parameter in mine.sample(parameters, mine.randrange(3)):
                parameter.sum()
        results.append(setting.end())
    return equal(*results)


@pytest.mark.parametrize("link", [None, disturbed], ids=["shared memory", "disturbed link"])
@pytest.mark.parametrize("schedules", [30, pytest.param(1000, marks=pytest.mark.thorough)])
def test_nothing_hangs_and_all_is_right_whatever_leaves_and_waits_when(ranks, schedules, link):
    assert ranks.run(random_schedules, 2, schedules, link, timeout=120) == [True, True]


def slower(inner):
    """A transport behind a link so slow that an order of need gains, however busy this machine is."""
    return Paced(inner, Link(RATE / 10))


def reported(rank, world_size):
    setting = Setting(rank, "priority", link=slower)
    for _ in range(11):
        setting.step()
    began = time.perf_counter()
    setting.step()
    stepped = time.perf_counter()
    time.sleep(0.4)  # the loop does something else
    slept = time.perf_counter()
    setting.optimizer.drain()
    at_most = time.perf_counter() - slept + stepped - began
    pending, report, exposed = setting.pending, setting.optimizer.report(), setting.model.last_step().exposed
    setting.end()
    return pending, report, str(report), exposed, at_most


def test_a_report_tells_what_was_exposed_and_the_bounds(ranks):
    for pending, report, text, exposed, at_most in ranks.run(reported, 2):
        assert not pending
        assert report.step == 12
        assert report.order == "priority"
        assert 0 < report.bound <= report.synchronous_bound
        assert 0 < report.exposed <= at_most
        assert "order priority" in text
        assert 0 <= exposed <= at_most


class Gated(Decorated):
    """A transport whose replies come when `gate` is opened."""

    def __init__(self, inner, gate):
        super().__init__(inner)
        self.gate = gate

    def start(self, request, channel):
        pending = self.inner.start(request, channel)
        wait = pending.wait

        def wait_at_the_gate(timeout):
            assert self.gate.wait(60)
            return wait(timeout)

        pending.wait = wait_at_the_gate
        return pending


def buffers_under_way(rank, world_size):
    """Whether buffers were spread, and slices still under way then, which come only afterwards."""
    gate = threading.Event()
    setting = Setting(rank, "priority", net=Plain, link=lambda inner: Gated(inner, gate))
    setting.step()
    statistics = setting.model.module[1].running_mean.fill_(rank + 1)
    setting.model.sync_buffers(candidate=True)
    spread = statistics.eq(1).all().item(), setting.pending
    gate.set()
    setting.end()
    return spread


def test_buffers_do_not_wait_for_the_slices_before_them(ranks):
    assert ranks.run(buffers_under_way, 2) == [(True, True)] * 2
