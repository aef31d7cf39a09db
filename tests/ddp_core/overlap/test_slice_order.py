"""When ranks look for another order of sending, and which steps are measured for it."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from gradwire.ddp_core.overlap import slice_order
from gradwire.ddp_core.overlap.slice_order import FIRST_UPDATE, INTERVAL, LONGEST, MEASURED, SliceOrder

STEPS = 8 * LONGEST


@pytest.fixture(params=["cpu", "cuda"])
def training(request, monkeypatch):
    """Runs steps of a model, and tells before which ones ranks look, and which overlap."""
    looks, overlapping = [], []
    assignment = SimpleNamespace(builds=1, sending=[])
    order = SliceOrder("auto", assignment, None, [torch.device(request.param)])
    on_host = SimpleNamespace(tensor=lambda values, device: torch.tensor(values))
    monkeypatch.setattr(slice_order, "torch", on_host)
    monkeypatch.setattr(slice_order, "broadcast", lambda *_, **__: looks.append(step))
    step = 0

    def run(gains=lambda _: False, before_step=lambda *_: None):
        nonlocal step
        monkeypatch.setattr(order, "_proposal", lambda: [gains(step), False])
        for step in range(STEPS):
            before_step(step, assignment)
            order.update(step)
            order.update(step)  # a forward that no step follows
            if order.overlaps(step):
                overlapping.append(step)
        return looks, overlapping

    return run


def test_where_nothing_is_gained_looks_get_rare_and_few_steps_are_measured(training):
    looks, overlapping = training()
    pauses = [later - earlier for earlier, later in pairwise(looks)]
    assert looks[0] == FIRST_UPDATE
    assert pauses[:5] == [INTERVAL, 2 * INTERVAL, 4 * INTERVAL, 8 * INTERVAL, LONGEST]
    assert set(pauses[5:]) == {LONGEST}
    assert overlapping == [
        step for look in [*looks, looks[-1] + LONGEST] for step in range(look - MEASURED, look) if step < STEPS
    ]
    assert len(overlapping) < 0.01 * STEPS


def test_where_overlap_pays_every_step_overlaps_and_looks_stay_frequent(training):
    looks, overlapping = training(gains=lambda _: True)
    assert looks == list(range(FIRST_UPDATE, STEPS, INTERVAL))
    assert overlapping == list(range(FIRST_UPDATE - MEASURED, STEPS))


def test_new_buckets_are_looked_at_as_the_first_ones_were(training):
    def build(step, assignment):
        assignment.builds += step == 5 * LONGEST

    looks, _ = training(before_step=build)
    since = [look - 5 * LONGEST for look in looks if look > 5 * LONGEST]
    assert since[:3] == [FIRST_UPDATE, FIRST_UPDATE + INTERVAL, FIRST_UPDATE + 3 * INTERVAL]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("wanted", ["backward", "synchronous"])
def test_where_no_other_order_is_wanted_nothing_is_looked_for_nor_measured(monkeypatch, wanted, device):
    monkeypatch.setattr(slice_order, "broadcast", None)
    order = SliceOrder(wanted, SimpleNamespace(builds=1, sending=[]), None, [torch.device(device)])
    for step in range(2 * LONGEST):
        order.update(step)
        assert order.overlaps(step) == (wanted == "backward")
        assert not order.measures(step)
    assert order.name == wanted


@pytest.mark.parametrize("wanted", ["auto", "priority"])
def test_a_few_steps_before_a_look_are_measured_whatever_overlaps(monkeypatch, wanted):
    monkeypatch.setattr(slice_order, "broadcast", lambda *_, **__: None)
    order = SliceOrder(wanted, SimpleNamespace(builds=1, sending=[]), None, [torch.device("cpu")])
    measured = []
    for step in range(FIRST_UPDATE + INTERVAL + 1):
        order.update(step)
        if order.measures(step):
            measured.append(step)
            assert order.overlaps(step)
    looks = (FIRST_UPDATE, FIRST_UPDATE + INTERVAL)
    assert measured == [step for look in looks for step in range(look - MEASURED, look)]


def test_parameters_on_several_devices_are_not_measured_and_their_order_stays():
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    for wanted, overlaps in (("auto", False), ("priority", True)):
        order = SliceOrder(wanted, SimpleNamespace(builds=1, sending=[]), None, devices)
        assert {order.overlaps(step) for step in range(STEPS)} == {overlaps}
        assert not any(order.measures(step) for step in range(STEPS))
        order.update(STEPS)  # it asks nobody
