"""When ranks plan another order of sending, and which steps are measured for it."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.ddp_core.overlap import slice_order
from gradwire.ddp_core.overlap.slice_order import FIRST_UPDATE, INTERVAL, MEASURED, SliceOrder

STEPS = 8 * INTERVAL


def in_training(monkeypatch, wanted, devices, before_step=lambda *_: None):
    """Before which steps ranks plan, and which are measured."""
    plans, measured = [], []
    assignment = SimpleNamespace(builds=1, sending=[])
    order = SliceOrder(wanted, assignment, None, devices)
    on_host = SimpleNamespace(tensor=lambda values, device: torch.tensor(values))
    monkeypatch.setattr(slice_order, "torch", on_host)
    monkeypatch.setattr(slice_order, "broadcast", lambda *_, **__: plans.append(step))
    for step in range(STEPS):
        before_step(step, assignment)
        order.update(step)
        order.update(step)  # a forward that no step follows
        if order.measures(step):
            measured.append(step)
    return order, plans, measured


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_steps_before_each_plan_are_measured(monkeypatch, device):
    order, plans, measured = in_training(monkeypatch, "priority", [torch.device(device)])
    assert order.overlaps
    assert plans == list(range(FIRST_UPDATE, STEPS, INTERVAL))
    following = [*plans, plans[-1] + INTERVAL]
    assert measured == [step for plan in following for step in range(plan - MEASURED, plan) if step < STEPS]


def test_new_buckets_are_planned_as_the_first_ones_were(monkeypatch):
    def build(step, assignment):
        assignment.builds += step == 5 * INTERVAL

    _, plans, _ = in_training(monkeypatch, "priority", [torch.device("cpu")], build)
    since = [plan - 5 * INTERVAL for plan in plans if plan > 5 * INTERVAL]
    assert since[:2] == [FIRST_UPDATE, FIRST_UPDATE + INTERVAL]


ALONE = [("synchronous", ["cpu"]), ("priority", ["cuda:0", "cuda:1"])]


@pytest.mark.parametrize(("wanted", "devices"), ALONE)
def test_what_does_not_overlap_or_is_on_several_devices_is_neither_planned_nor_measured(monkeypatch, wanted, devices):
    order, plans, measured = in_training(monkeypatch, wanted, list(map(torch.device, devices)))
    assert (plans, measured) == ([], [])
    assert order.overlaps == (wanted != "synchronous")
    assert order.name == ("backward" if wanted == "priority" else wanted)
