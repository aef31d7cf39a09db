"""Two levels: exact within a host, the inner method between hosts, each rank of a host for its share."""

import pytest
import torch

from gradwire.compress import Layout, Ranks, Simulation, compressor, dry_run, most_rounds
from gradwire.compress.state import tree as states
from gradwire.compress.state.shares import share_of
from gradwire.testing import SHAPES, held_back

from ..given import gradients, layout, mean, placed
from ..test_laws import KINDS, assert_conserves

HOSTS = [(2, 1), (4, 2), (6, 3), (3, 3), (8, 4)]  # (ranks, ranks a host)
LAYERS = SHAPES["layers"]
INNER = [spec for spec in KINDS if spec != "hosts"]

FED_BACK = [
    "topk:ratio=0.1",
    "topk:ratio=0.1,error_feedback=0.9",
    "onebit:block=64",
    "int8:error_feedback=true",
    "powersgd:rank=1,momentum=0.9",
    "int4:error_feedback=0.8,momentum=0.9",
    "dgc:ratio=0.1",
    "bf16+powersgd:rank=2,error_feedback=0.9",
]


def on_hosts(shapes, world_size, ranks_per_host, dtype=torch.float32):
    return layout(*shapes, dtype=dtype, world_size=world_size, per_host=ranks_per_host)


@pytest.mark.parametrize("spec", INNER)
def test_what_goes_in_comes_out_or_is_held_back(spec):
    dtype, world_size, ranks_per_host = [(torch.float32, 4, 2), (torch.bfloat16, 6, 3)][INNER.index(spec) % 2]
    for shapes in (LAYERS, SHAPES["one element"]):
        within = on_hosts(shapes, world_size, ranks_per_host, dtype)
        assert_conserves(spec, within, 2, compressor(f"hosts+{spec}"), roundings=2)


@pytest.mark.parametrize("spec", FED_BACK)
def test_what_rounding_to_16_bits_takes_is_held_back(spec):
    """It is the difference to the same numbers in float32."""
    narrow, wide = (on_hosts(LAYERS, 4, 2, dtype) for dtype in (torch.bfloat16, torch.float32))
    rounded, exact = (Simulation(compressor(f"hosts+{spec}"), within) for within in (narrow, wide))
    given = gradients(narrow)
    found, expected = rounded.step(given)[0], exact.step([each.float() for each in given])[0]
    taken = expected - found.float()
    assert taken.abs().max() > 1e-4
    held = held_back(rounded, narrow) - held_back(exact, wide)
    torch.testing.assert_close(held.float(), taken, rtol=0, atol=4e-6)


def test_what_rounding_to_16_bits_takes_gets_no_momentum():
    within = on_hosts(LAYERS, 4, 2, torch.bfloat16)
    simulation = Simulation(compressor("hosts+topk:ratio=0.3,momentum=0.9"), within)
    velocity, due = (torch.zeros(within.numel, dtype=torch.float64) for _ in range(2))
    for step in range(12):
        given = gradients(within, step)
        velocity = 0.9 * velocity + sum(each.double() for each in given) / 4
        due += velocity - simulation.step(given)[0].double()
    torch.testing.assert_close(held_back(simulation, within), due, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", ["none", "topk:error_feedback=false", "int8:error_feedback=false"])
def test_without_error_feedback_rounding_is_not_held_back_either(spec):
    within = on_hosts(LAYERS, 4, 2, torch.bfloat16)
    simulation = Simulation(compressor(f"hosts+{spec}"), within)
    simulation.step(gradients(within))
    assert not held_back(simulation, within).any()


@pytest.mark.parametrize(("world_size", "ranks_per_host"), HOSTS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_plain_sums_give_the_mean_and_all_ranks_the_same_bits(world_size, ranks_per_host, shapes):
    within = on_hosts(shapes, world_size, ranks_per_host)
    outputs = Simulation(compressor("hosts+none"), within).step(given := gradients(within))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    torch.testing.assert_close(outputs[0], mean(given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=1", "onebit", "int4"])
def test_between_hosts_it_is_the_inner_method_on_the_hosts_means(spec):
    """With hosts of two ranks, whole parameters dealt out: what each share's ranks would do alone, given host means."""
    within = on_hosts(((40, 24), (40, 24)), 4, 2)
    given = gradients(within)
    outputs = Simulation(compressor(f"hosts+{spec}"), within).step(given)
    halves = []
    for place in range(2):
        mine = share_of(within, cut=spec != "powersgd:rank=1").at(place)
        assert (mine.numel, mine.ranks.world_size) == (960, 2)
        hosts = [(given[host] * 0.5 + given[host + 1] * 0.5)[960 * place : 960 * (place + 1)] for host in (0, 2)]
        halves.append(Simulation(compressor(spec), mine).step(hosts)[0])
    torch.testing.assert_close(outputs[0], torch.cat(halves))


def test_with_one_rank_a_host_it_is_the_inner_method():
    within = layout(*LAYERS, world_size=3)
    for spec in ("topk", "powersgd:rank=2", "none"):
        two, one = (Simulation(compressor(each), within) for each in (f"hosts+{spec}", spec))
        for step in range(2):
            found, expected = (each.step(gradients(within, step)) for each in (two, one))
            assert all(map(torch.equal, found, expected))


def test_on_a_single_host_the_average_is_exact_and_nothing_is_sent():
    within = on_hosts(LAYERS, 4, 4)
    given = gradients(within)
    torch.testing.assert_close(Simulation(compressor("hosts+topk"), within).step(given)[0], mean(given))
    assert dry_run(compressor("hosts+topk"), within).sent_bytes == 0


def test_given_ranks_make_hosts():
    within = layout(*LAYERS, world_size=4)
    simulation = Simulation(compressor("hosts:ranks=2+topk"), within)
    assert {each.ranks.per_host for each in simulation.layouts} == {2}
    found = Simulation(compressor("hosts+topk"), placed(within, per_host=2))
    assert all(map(torch.equal, simulation.step(gradients(within)), found.step(gradients(within))))


class TestShares:
    def test_parameters_are_dealt_out_whole(self):
        within = on_hosts(((8, 8), (4,), (8, 4), (32,)), 4, 2)
        share = share_of(within, cut=False)
        assert share.sizes == (68, 64)
        assert [share.at(place).names for place in range(2)] == [("p0", "p1"), ("p2", "p3")]
        assert share.at(1).shapes == ((8, 4), (32,))

    @pytest.mark.parametrize("cut", [True, False])
    @pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
    def test_they_are_all_of_the_bucket(self, shapes, cut):
        within = on_hosts(shapes, 8, 4)
        share = share_of(within, cut=cut)
        parts = [share.at(place) for place in range(4)]
        assert [part.numel for part in parts] == list(share.sizes)
        flat = torch.arange(float(within.numel))
        for part, numbers in zip(parts, flat.split(share.sizes), strict=True):
            for name, view in part.views(numbers).items():
                start = part.start(name)
                assert torch.equal(view.reshape(-1), within.views(flat)[name].view(-1)[start : start + view.numel()])

    def test_buckets_of_one_parameter_go_to_different_ranks(self):
        owners = set()
        for name in map(str, range(32)):
            within = Layout((name,), ((8, 8),), torch.float32, torch.device("cpu"), Ranks(8, per_host=4))
            owners.add(share_of(within, cut=False).sizes.index(64))
        assert owners == set(range(4))


def test_between_hosts_each_rank_sends_its_share():
    within = on_hosts(((128, 64), (64, 128)), 8, 4)
    found = dry_run(compressor("hosts+none"), within)
    assert (found.sent_bytes, found.host_bytes) == (4 * 4096, 4 * (3 / 4 * 16384 + 3 * 4096))
    assert found.rounds == 3


def test_all_ranks_of_a_host_take_the_same_rounds():
    """One share has matrices, of two rounds, the other only vectors."""
    within = on_hosts(((4096,), (64, 64)), 4, 2)
    built = compressor("hosts+powersgd:rank=1")
    rounds = [dry_run(built, placed(within, rank=rank)).rounds for rank in range(4)]
    assert rounds == [4] * 4 == [most_rounds(built, [within])] * 4


def test_what_does_not_fit_the_parameter_is_refused():
    within, built = on_hosts(((8, 8),), 4, 2), compressor("hosts+powersgd")
    saved = next(filter(None, map(states.save, Simulation(built, within).states)))
    other = Simulation(built, on_hosts(((4, 4),), 4, 2)).states[0]
    with pytest.raises(ValueError, match=r"parameter 'p0'.*load the state with the model that saved it"):
        states.load(other, saved)


def test_ranks_that_do_not_fill_hosts_are_refused():
    with pytest.raises(ValueError, match="hosts:ranks=3 does not divide the 4 ranks: give the number of ranks"):
        Simulation(compressor("hosts:ranks=3+topk"), layout((4,), world_size=4))
