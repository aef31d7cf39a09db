"""Weights and gradients of shards, on one rank: what is filled in, and which step it counts for."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.compress import Layout, Ranks
from gradwire.compress.shards.layout import ShardLayout
from gradwire.compress.shards.reduction import shard_sum
from gradwire.compress.shards.weights import WeightKind, weight_gather
from gradwire.ddp_core.averaging.shard_averager import ShardAverager

CPU, LIMIT = torch.device("cpu"), timedelta(seconds=20)
LAYOUT = ShardLayout(Layout(("w",), ((4, 2),), torch.float32, CPU), (0,))


def averager_of(group, gradients="none", weights="none"):
    return ShardAverager(shard_sum(gradients), weight_gather(weights), group, CPU, LIMIT)


def begin(averager):
    averager.steps.begin()
    averager.enter_step()


def gathered(averager, mine, training=True):
    out = torch.zeros_like(mine)
    program = averager.weights.gather(mine, out, WeightKind(mine.dtype, LAYOUT))
    averager.gather(0, ("w",), program, out, training=training).wait(LIMIT)
    return out


def reduced(averager, grad, scale=1.0):
    out = torch.zeros_like(grad)
    averager.reduce(0, LAYOUT, grad.clone(), out, scale).wait(LIMIT)
    return out


def test_a_step_has_what_was_gathered_before_its_gradients(group):
    averager, numbers = averager_of(group), torch.arange(8.0)
    for _ in range(2):
        assert torch.equal(gathered(averager, numbers), numbers)
        begin(averager)
        assert torch.equal(reduced(averager, numbers, scale=0.5), numbers / 2)
        averager.steps.end()
        assert len(averager.stats().buckets) == 2
    assert averager.stats().steps == 2
    assert averager.measured().begun == 2
    assert averager.measured().sharded
    averager.close()


def test_what_is_gathered_outside_of_training_counts_in_no_step(group):
    averager, numbers = averager_of(group), torch.arange(8.0)
    gathered(averager, numbers, training=False)
    averager.note_gather(("w",), numbers, numbers, training=False)
    stats = averager.stats()
    assert (stats.steps, stats.buckets) == (0, ())
    assert stats.total.traffic.rounds == 2
    assert stats.total.traffic.payload_bytes == 2 * numbers.nbytes
    averager.close()


@pytest.mark.parametrize("ends", [True, False])
def test_what_a_codec_loses_comes_with_the_next_gradient_unless_the_step_broke_off(group, ends):
    averager, numbers = averager_of(group, "int4:block=8,error_feedback=1"), torch.linspace(-1, 1, 8)
    begin(averager)
    first = reduced(averager, numbers)
    if ends:
        averager.steps.end()
    begin(averager)
    second = reduced(averager, torch.zeros(8))
    averager.steps.end()
    lost = numbers - first
    assert lost.any()
    (state,) = averager.memory.states()
    came = second + state.held_back()["w"]
    torch.testing.assert_close(came, lost if ends else torch.zeros(8), rtol=0, atol=1e-6)
    averager.close()


def among_others(rank, world_size):
    """The mean that every second rank gets with its like, and the weights of these."""
    groups = [dist.new_group(list(range(first, world_size, 2)), backend="gloo") for first in range(2)]
    averager = averager_of(groups[rank % 2])
    layout = ShardLayout(Layout(("w",), ((4, 2),), torch.float32, CPU, Ranks(2, rank // 2)), (0,))
    begin(averager)
    mean, weights = torch.zeros(4), torch.zeros(2)
    averager.reduce(0, layout, torch.full((8,), float(rank)), mean, 1.0).wait(LIMIT)
    averager.steps.end()
    program = averager.weights.gather(torch.full((1,), float(rank)), weights, WeightKind(torch.float32, layout))
    averager.gather(0, ("w",), program, weights, training=True).wait(LIMIT)
    averager.close()
    return mean.tolist(), weights.tolist()


def test_an_averager_takes_any_group_of_ranks(ranks):
    answers = ranks.run(among_others, 4)
    assert answers == [([rank % 2 + 1.0] * 4, [rank % 2 + 0.0, rank % 2 + 2.0]) for rank in range(4)]
