"""Steps of the shipped traces for a planner, against figures computed by hand from sizes and rates."""

import pytest

from gradwire.ddp_core.measure.link_schedule import arrivals, optimal, priority_order, step_seconds, synchronous
from gradwire.ddp_core.measure.step_model import LinkCost, StepModel
from gradwire.experiments.workloads.emulation import load_trace, step_by_layers, step_by_slices

GBIT = 1e9 / 8  # bytes a second
KNOWN = [  # trace, hosts, Gbit/s, compressor; milliseconds: synchronous, optimal
    ("resnet50", 4, 4, "none", 339, 307),
    ("resnet50", 4, 10, "none", 155, 123),
    ("resnet50", 4, 4, "bf16", 186, 153),
    ("resnet50", 4, 7, "bf16", 120, 97),
    ("vgg19", 2, 10, "none", 617, 471),
    ("vgg19", 4, 10, "none", 847, 690),
]


def wire(model: StepModel) -> float:
    return sum(piece.wire for piece in model.pieces)


@pytest.mark.parametrize(("trace", "hosts", "rate", "spec", "waits", "best"), KNOWN)
def test_bounds_of_known_models(trace, hosts, rate, spec, waits, best):
    model = step_by_layers(load_trace(trace), spec, hosts, LinkCost(0.0, 1 / (rate * GBIT)))
    found = [1e3 * bound(model) for bound in (synchronous, optimal)]
    assert found == pytest.approx([waits, best], abs=0.6)


@pytest.mark.parametrize("hosts", [2, 4])
def test_on_the_wire_a_ring_sends_each_byte_less_than_twice(hosts):
    trace, cost = load_trace("resnet50"), LinkCost(0.0, 1 / GBIT)
    dense = 2 * (hosts - 1) / hosts * 4 * trace.elements / GBIT
    for build in (step_by_layers, step_by_slices):
        assert wire(build(trace, "none", hosts, cost)) == pytest.approx(dense, rel=1e-4)
        assert wire(build(trace, "bf16", hosts, cost)) == pytest.approx(dense / 2, rel=1e-4)


def test_slices_are_equal_parts_of_large_buckets_unless_the_compressor_remembers_more_than_single_numbers():
    """Of vgg19's first classifier of 411 MB, whose gradients bf16 halves."""
    largest = 4 * 4096 * 25088
    for spec, size in [("none", largest), ("bf16", largest / 2)]:
        pieces = step_by_slices(load_trace("vgg19"), spec, 2, LinkCost(0.0, 1.0), slice_mb=4).pieces
        parts = [piece for piece in pieces if piece.wire == pytest.approx(4 * 2**20, rel=0.02)]
        assert sum(piece.wire for piece in parts) > size
        assert max(piece.wire for piece in pieces) <= 1.5 * 4 * 2**20
        assert sum(piece.wire for piece in pieces) == pytest.approx(4 * 143_667_240 * size / largest)
    for spec in ("int8", "topk:ratio=0.1"):
        cut = step_by_slices(load_trace("vgg19"), spec, 2, LinkCost(0.0, 1.0), slice_mb=4).pieces
        assert max(piece.wire for piece in cut) <= 1.5 * 4 * 2**20
    whole = step_by_slices(load_trace("vgg19"), "powersgd:rank=4", 2, LinkCost(0.0, 1.0)).pieces
    assert len(whole) < 20


LITTLE = [  # trace, what sends little, hosts, Gbit/s; of the best step: with slices of 2 MiB, and of an eighth of all
    ("gpt-20m", "topk:ratio=0.01", 4, 1.0, 1.27, 1.12),
    ("resnet18-cifar", "topk:ratio=0.01", 4, 0.3, 1.29, 1.00),
    ("inceptionv3", "onebit", 4, 0.3, 1.20, 1.03),
]


@pytest.mark.parametrize(("trace", "spec", "hosts", "rate", "before", "now"), LITTLE)
def test_a_model_that_sends_little_sends_it_in_several_slices(trace, spec, hosts, rate, before, now):
    loaded, link = load_trace(trace), LinkCost(0.0, 1 / (rate * GBIT))
    best = optimal(step_by_layers(loaded, spec, hosts, link))
    models = [step_by_slices(loaded, spec, hosts, link, slice_mb=size) for size in (2.0, None)]
    found = [step_seconds(model, arrivals(model, priority_order(model))) / best for model in models]
    assert found == pytest.approx([before, now], abs=0.01)
