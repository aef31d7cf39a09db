"""Bytes that a plan computes are the bytes that a step sends."""

import pytest
import torch
from torch import nn

import gradwire
from gradwire.experiments.assumed_parts import Cluster
from gradwire.experiments.sharded_plan import plan_sharded
from gradwire.experiments.sharded_step import predicted_shards

from ..hooks.fsdp.given import network, trained

RANKS = 4
PAIRS = [("none", "none"), ("bf16", "bf16"), ("int8", "int4"), ("int4", "int2"), ("int4:send=weights", "onebit")]
PAIRS += [("hosts:ranks=2+int4", "hosts:ranks=2,inside=int8+int4"), ("hosts:ranks=2+none", "none")]


def parts():
    """The parameters of the modules of `network`."""
    with torch.device("meta"):
        modules = [nn.Linear(7, 33), nn.Linear(33, 20), nn.Linear(20, 5)]
    return [
        {f"{place}.{name}": each for name, each in module.named_parameters()} for place, module in enumerate(modules)
    ]


def counted(rank, world_size):
    found = []
    for gather, reduce in PAIRS:
        model = network(world_size)
        handle = gradwire.attach(model, gather=gather, reduce=reduce)
        trained(model, rank, steps=2)
        last = handle.stats().last.traffic
        found.append((last.payload_bytes, last.sent_bytes))
        handle.close()
    return found


def test_bytes_planned_are_bytes_sent(ranks):
    planned = [plan_sharded(parts(), *pair, world_size=RANKS) for pair in PAIRS]
    for found in ranks.run(counted, RANKS):
        for pair, plan, bytes_sent in zip(PAIRS, planned, found, strict=True):
            assert bytes_sent == (plan.payload_bytes_per_step, plan.sent_bytes_per_step), pair


def test_state_is_that_of_residuals_and_weights_in_use():
    layout_bytes = (
        4 * 4 * sum(-(-rows // 4) * row for rows, row in ((33, 7), (33, 1), (20, 33), (20, 1), (5, 20), (5, 1)))
    )
    usual = 2 * 4 * len(parts())  # the change of a step, before and after it
    assert plan_sharded(parts(), "int8", "int4", world_size=4).state_bytes == layout_bytes
    assert plan_sharded(parts(), "int4", "none", world_size=4).state_bytes == 2 * layout_bytes + usual
    assert plan_sharded(parts(), "bf16", "bf16", world_size=4).state_bytes == 0
    assert plan_sharded(parts(), "none", "hosts:ranks=2+int4", world_size=4).state_bytes == layout_bytes / 2


@pytest.mark.parametrize("pair", [("powersgd", "none"), ("none", "topk"), ("none", "hosts:ranks=3+int4")])
def test_what_shards_do_not_take_is_refused(pair):
    with pytest.raises(ValueError, match=r"no rank has whole|does not divide"):
        plan_sharded(parts(), *pair, world_size=RANKS)


def test_without_a_network_a_step_takes_its_computation_and_its_encoding():
    for spec, encodes in (("int8/int4", True), ("none", False)):
        found = predicted_shards(parts(), Cluster(RANKS, 1, 1e18), spec, 1e-3)
        assert (found.encode > 0) == encodes
        assert found.step == pytest.approx(found.computation + found.encode, rel=1e-6)
        assert found.exposed == pytest.approx(found.encode, abs=1e-9)
