"""Advice for the log of shards: what `hosts+` would spare, and nothing where it spares nothing."""

import pytest

from gradwire.compress import Ranks
from gradwire.compress.shards.reduction import shard_sum
from gradwire.compress.shards.requests import shards_sent_in_vain
from gradwire.compress.shards.weights import weight_gather


def told(gather, reduce, ranks, placed=1):
    weights, reduction = (made.placed(placed, ranks.world_size) for made in (weight_gather(gather), shard_sum(reduce)))
    return list(shards_sent_in_vain(weights, reduction, ranks))


@pytest.mark.parametrize("ranks", [Ranks(16, per_host=8), Ranks(4, per_host=2), Ranks(12, per_host=4)])
@pytest.mark.parametrize("spec", ["int8", "int4", "none"])
def test_weights_leave_a_host_once_a_ring_and_gradients_once_a_rank_and_hosts_spare_the_rest(spec, ranks):
    weights, gradients = told(spec, spec, ranks)
    assert f"gather=hosts+{spec} sends" in weights
    assert f"reduce=hosts+{spec} sends" in gradients
    ring = (ranks.world_size - 1) / (ranks.world_size - ranks.per_host)  # rows in a ring over all, and in rings across
    assert f" {ring:.1f}x fewer" in weights
    assert f" {float(ranks.per_host):.1f}x fewer" in gradients


@pytest.mark.parametrize(("ranks", "placed"), [(Ranks(4), 1), (Ranks(4, per_host=4), 1), (Ranks(4, per_host=2), 2)])
def test_nothing_is_said_with_a_rank_a_host_or_one_host_or_two_levels_already(ranks, placed):
    spec = "hosts:ranks=2+int4" if placed == 2 else "int4"
    assert told(spec, spec, ranks, placed) == []
