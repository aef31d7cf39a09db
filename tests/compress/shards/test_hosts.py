"""Shards in two levels in the simulator: hosts sum first, and weights travel once to each other host."""

from math import prod

import pytest
import torch

from gradwire.compress import Ranks, simulate
from gradwire.compress.shards.weights import HeldWeights, OwnRows, WeightKind, weight_gather
from gradwire.compress.simulate import traffic
from gradwire.compress.state.tree import Leaves, save

from .test_reduction import SimulatedRanks, flat_of, layouts, wholes

ARRANGED = [(4, 2), (6, 3), (6, 2)]  # ranks, ranks of a host


def quantized(row, bits, sizes):
    """Blocks of 128, anew in each shard: the nearest multiple of a scale, in float32; written out anew."""
    steps, largest_code = {8: (127.0, 127), 4: (8.0, 7)}[bits]
    found = []
    shards = row.split(sizes * (row.numel() // sum(sizes)))
    for block in (block for shard in shards for block in shard.split(128)):
        scale = block.abs().max() / steps
        found.append((block / scale).round().clamp(-largest_code, largest_code) * scale if scale > 0 else block)
    return torch.cat(found)


class ByHand:
    """The sums of hosts, what each rank sends the other hosts of them, and what it holds back, in plain loops."""

    def __init__(self, ranks, per_host, bits, inside, sizes):
        self.ranks, self.per_host, self.bits, self.inside = ranks, per_host, bits, inside
        self.held = {}  # (rank, owner of the row)
        self.sizes = sizes  # of a row's shards, each with its padding

    def step(self, rows):
        """The mean of the rows for each owner; `rows`: of each rank, (ranks, row)."""
        means = [torch.zeros_like(rows[0][0]) for _ in range(self.ranks)]
        for rank in range(self.ranks):
            host, place = divmod(rank, self.per_host)
            owners = range(place, self.ranks, self.per_host)
            total = 0
            for other in range(host * self.per_host, (host + 1) * self.per_host):
                sent = torch.cat([rows[other][owner] for owner in owners])
                total = total + (quantized(sent, self.inside, self.sizes) if self.inside else sent)
            for owner, of_host in zip(owners, total.split(rows[0].shape[1]), strict=True):
                wanted = of_host + self.held.get((rank, owner), 0)
                sent = quantized(wanted, self.bits, self.sizes)
                self.held[rank, owner] = wanted - sent
                means[owner] += sent / self.ranks
        return torch.cat(means)


@pytest.mark.parametrize(("ranks", "per_host"), ARRANGED)
@pytest.mark.parametrize(
    ("spec", "bits", "inside"),
    [("hosts+int4", 4, None), ("hosts:inside=int8+int4", 4, 8), ("hosts+int8:error_feedback=1", 8, None)],
)
def test_hosts_sum_first_and_send_each_other_what_formulas_say(ranks, per_host, spec, bits, inside):
    simulated = SimulatedRanks(spec, ranks, per_host=per_host)
    by_hand = ByHand(ranks, per_host, bits, inside, [prod(shape) for shape in layouts(ranks)[0].shapes])
    for step in range(4):
        named = [wholes(10 * rank + step) for rank in range(ranks)]
        rows = [flat_of(layouts(ranks)[0], each).view(ranks, -1) for each in named]
        torch.testing.assert_close(simulated.step(named), by_hand.step(rows), rtol=1e-5, atol=1e-6)
    for rank, held in enumerate(simulated.held()):
        for owner, row in enumerate(held.view(ranks, -1)):
            expected = by_hand.held.get((rank, owner), torch.zeros_like(row))
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)


def test_a_rank_holds_back_of_as_many_rows_as_there_are_hosts_and_nothing_of_what_pads_them():
    simulated, layout = SimulatedRanks("hosts+onebit:error_feedback=1", 6, per_host=3), layouts(6)[0]
    simulated.step([wholes(rank) for rank in range(6)])
    assert all(state.residual.numel == 2 * layout.row for state in simulated.states)
    assert all(torch.equal(flat_of(layout, layout.joined(held)), held) for held in simulated.held())


def gathered(spec, ranks, per_host):
    """Three gathers of weights that change; bytes that rank 0 sends between hosts, and inside its own, in each."""
    built = weight_gather(spec).placed(per_host, ranks)
    held = [HeldWeights(OwnRows.empty(each)) if built.differences else None for each in layouts(ranks)]
    kinds = [WeightKind(torch.float32, each) for each in layouts(ranks)]
    found, bytes_sent = [], []
    for step in range(3):
        rows = flat_of(layouts(ranks)[0], wholes(step)).view(ranks, -1)
        outs, asked = [torch.empty(rows.numel()) for _ in rows], []
        programs = [built.gather(*each) for each in zip(rows, outs, kinds, held, strict=True)]
        simulate(programs, per_host, asked.append)
        sent = [traffic(each, Ranks(ranks, 0, per_host)) for each in asked]
        found.append(outs)
        bytes_sent.append((sum(each.sent_bytes for each in sent), sum(each.host_bytes for each in sent)))
    return found, bytes_sent


@pytest.mark.parametrize(("ranks", "per_host"), ARRANGED)
@pytest.mark.parametrize("spec", ["none", "int8", "int4", "int4:send=weights"])
def test_weights_go_once_to_each_other_host_and_have_the_same_bits(spec, ranks, per_host):
    one_level, all_bytes = gathered(spec, ranks, 1)
    two_levels, between = gathered(f"hosts+{spec}", ranks, per_host)
    for once, twice in zip(one_level, two_levels, strict=True):
        assert all(torch.equal(out, once[0]) for out in twice)
    hosts = ranks // per_host
    for (sent, _), (across, inside) in zip(all_bytes, between, strict=True):
        payload = sent / (ranks - 1)
        assert (across, inside) == ((hosts - 1) * payload, (per_host - 1) * hosts * payload)


def test_what_is_held_back_is_saved_whole_and_loaded_by_the_same_place_alone():
    simulated = SimulatedRanks("hosts+int4", 4, per_host=2)
    simulated.step([wholes(rank) for rank in range(4)])
    saved = [save(state) for state in simulated.states]
    for rank, state in enumerate(simulated.states):
        other = simulated.reduction.init(layouts(4)[rank])
        Leaves(other).load(saved[rank])
        assert torch.equal(other.residual.flat, state.residual.flat)
        wrong = simulated.reduction.init(layouts(4)[rank ^ 1])
        with pytest.raises(ValueError, match="resize=True"):
            Leaves(wrong).load(saved[rank])
