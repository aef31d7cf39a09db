"""Shards in the simulator: nothing of a gradient is lost, means converge, and what is not finite is told to all ranks."""

import pytest
import torch

from gradwire.compress import compressors, simulate
from gradwire.compress.shards.layout import ShardLayout
from gradwire.compress.shards.reduction import Finite, shard_sum
from gradwire.compress.shards.weights import WeightKind, weight_gather
from gradwire.compress.state.tree import Leaves, save

from ..given import gradients, layout, placed

SHAPES, DIMS = ((5, 3), (7,), (4, 6)), (0, 0, 1)
SPECS = ["none", "int8:error_feedback=1", "int4", "int2", "ternary", "onebit:error_feedback=1"]
SPECS += ["int8:error_feedback=1,rounding=stochastic", "int8:error_feedback=1,block=8"]
SPECS += ["bf16", "fp16"]


def layouts(ranks, dtype=torch.float32):
    whole = layout(*SHAPES, dtype=dtype, names="abc", world_size=ranks)
    return [ShardLayout(placed(whole, rank=rank), DIMS) for rank in range(ranks)]


def wholes(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = zip("abc", SHAPES, strict=True)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes}


def flat_of(within, named, dtype=torch.float32):
    flat = torch.zeros(within.numel, dtype=dtype)
    for name, whole in named.items():
        within.cut(name, whole, flat)
    return flat


class SimulatedRanks:
    """All ranks of a reduction, step after step."""

    def __init__(self, spec, ranks, dtype=torch.float32, per_host=1):
        self.reduction, self.dtype, self.per_host = shard_sum(spec).placed(per_host, ranks), dtype, per_host
        self.layouts = layouts(ranks, dtype)
        self.states = [self.reduction.init(layout) for layout in self.layouts]

    def step(self, named, scale=1.0):
        """The rows of the mean gradient, one a rank, as one flat buffer."""
        outs = [torch.zeros(layout.row, dtype=self.dtype) for layout in self.layouts]
        for state in self.states:
            state.finite = Finite()
        grads = [flat_of(*pair, self.dtype) for pair in zip(self.layouts, named, strict=True)]
        programs = zip(grads, self.states, outs, strict=True)
        simulate([self.reduction.reduce(grad, state, out, scale) for grad, state, out in programs], self.per_host)
        return torch.cat(outs)

    def held(self):
        """What each rank holds back, as rows of all ranks."""
        held = (each.residual for each in self.states)
        none = torch.zeros(self.layouts[0].numel)
        return [none if each is None else each.layout.spread(each.wide()) for each in held]


@pytest.mark.parametrize("feedback", ["error_feedback=false", "error_feedback=1"])
@pytest.mark.parametrize("tail", [1, 12])  # elements of the last block of 16
def test_what_fills_up_the_last_block_of_a_row_makes_no_sign_smaller(tail, feedback):
    reduction, row, ranks = shard_sum(f"onebit:rotate=false,block=16,{feedback}"), 32 + tail, 2
    whole = layout((ranks * row,), world_size=ranks)
    given, outs = gradients(whole), [torch.zeros(row) for _ in range(ranks)]
    states = [reduction.init(ShardLayout(placed(whole, rank=rank), (0,))) for rank in range(ranks)]
    simulate([reduction.reduce(flat.clone(), *each) for flat, *each in zip(given, states, outs, strict=True)])
    blocks = zip(*(each.view(ranks, row).split(16, 1) for each in given), strict=True)
    signs = [sum(part.sign() * part.abs().mean(1, keepdim=True) for part in each) / ranks for each in blocks]
    torch.testing.assert_close(torch.stack(outs), torch.cat(signs, 1))


HOSTS = ["hosts+none", "hosts+int4", "hosts+onebit:error_feedback=1", "hosts+int2", "hosts+int4:residual_bits=8"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("spec", [*SPECS, *HOSTS])
def test_means_and_what_is_held_back_add_up_to_the_gradients(spec, dtype):
    simulated, total, given = SimulatedRanks(spec, 4, dtype, 2 if spec in HOSTS else 1), 0, 0
    for step in range(3):
        named = [wholes(10 * rank + step, dtype) for rank in range(4)]
        for each in named if spec in HOSTS else ():
            each["a"][0] = 0
        mean = simulated.step(named).double()
        total = total + mean
        assert spec not in HOSTS or not layouts(4, torch.float64)[0].joined(mean)["a"][0].any()
        given = given + sum(flat_of(layouts(4)[0], each, torch.float64) for each in named) / 4
    held = sum(each.double() for each in simulated.held()) / 4
    # rounded for good: the mean, by its owner, or what is sent
    rounded = dtype == torch.bfloat16 or spec in ("bf16", "fp16") or "bits=8" in spec
    tolerance = 3e-2 if rounded else 1e-5
    joined = layouts(4, torch.float64)[0].joined  # what pads shards is no gradient
    torch.testing.assert_close(joined(total + held), joined(given), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spec", [*SPECS, "int4:rotate=true", "onebit:residual_bits=8"])
def test_nothing_is_held_back_of_what_pads_shards(spec):
    simulated, within = SimulatedRanks(spec, 4), layouts(4)[0]
    for step in range(2):
        simulated.step([wholes(10 * rank + step) for rank in range(4)])
    for held in simulated.held():
        assert torch.equal(flat_of(within, within.joined(held)), held)


UNUSED = {"a": (0, 3), "c": (1,)}  # rows
KEPT = [*SPECS, "int2:error_feedback=false", "int4:rotate=true", "onebit:residual_bits=8", "int4:error_feedback=0.9"]


@pytest.mark.parametrize("spec", KEPT)
def test_rows_that_are_zero_on_a_rank_stay_so_in_what_it_holds_back_and_on_all_ranks_in_the_mean(spec):
    simulated = SimulatedRanks(spec, 4)
    for step in range(3):
        named = [wholes(10 * rank + step) for rank in range(4)]
        for each in named:
            each["b"].zero_()
            for name, rows in UNUSED.items():
                each[name][list(rows)] = 0
        named[2]["a"][1] = 0  # on this rank alone
        mean = layouts(4)[0].joined(simulated.step(named))
        assert mean["a"][1].any()
        held = [layouts(4)[0].joined(each) for each in simulated.held()]
        assert not held[2]["a"][1].any()
        for each in (mean, *held):
            assert not each["b"].any()
            assert not any(each[name][list(rows)].any() for name, rows in UNUSED.items())


@pytest.mark.parametrize("spec", ["int4", "int4:residual_bits=8"])
def test_means_of_a_constant_gradient_converge_to_it(spec):
    simulated, named = SimulatedRanks(spec, 4), [wholes(rank) for rank in range(4)]
    exact = sum(flat_of(layouts(4)[0], each) for each in named) / 4
    total, errors = torch.zeros_like(exact), []
    for step in range(1, 65):
        total += simulated.step(named)
        errors.append((total / step - exact).abs().max().item())
    assert errors[63] < errors[0] / 20


def test_a_part_of_what_is_held_back_may_be_kept():
    whole, half = SimulatedRanks("int4", 4), SimulatedRanks("int4:error_feedback=0.5", 4)
    named = [wholes(rank) for rank in range(4)]
    assert torch.equal(whole.step(named), half.step(named))
    for one, other in zip(whole.held(), half.held(), strict=True):
        torch.testing.assert_close(other, 0.5 * one)


@pytest.mark.parametrize("spec", ["int8:error_feedback=1", "int4", "onebit", "int4:error_feedback=0.9"])
def test_of_what_8_bits_hold_back_a_254th_of_the_largest_is_forgotten_at_most(spec):
    joined = spec + ("," if ":" in spec else ":")
    narrow, wide = SimulatedRanks(f"{joined}residual_bits=8", 4), SimulatedRanks(spec, 4)
    named = [wholes(rank) for rank in range(4)]
    assert torch.equal(narrow.step(named), wide.step(named))
    for one, other in zip(narrow.held(), wide.held(), strict=True):
        assert (one - other).abs().max() <= other.abs().max() / 254 * 1.001
    assert any(not torch.equal(*pair) for pair in zip(narrow.held(), wide.held(), strict=True))


def test_8_bits_take_an_eighth_more_than_a_quarter_of_the_memory_of_32_at_most():
    within = ShardLayout(layout((1024, 256), world_size=4), (0,))
    narrow, wide = (shard_sum(spec).init(within).residual.flat.nbytes for spec in ("int4:residual_bits=8", "int4"))
    assert narrow <= wide / 4 * 1.125


@pytest.mark.parametrize(("spec", "narrow"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_of_16_bits_each_rank_sums_in_32_what_others_have_rounded_once(spec, narrow, dtype):
    ranks = 64
    simulated, named = SimulatedRanks(spec, ranks, dtype), [wholes(rank, dtype) for rank in range(ranks)]
    exact = sum(flat_of(layouts(ranks)[0], each, dtype).to(narrow).double() for each in named) / ranks
    unit = 2**-9 if dtype == torch.bfloat16 else 1e-6  # of the mean, in the dtype of gradients
    torch.testing.assert_close(simulated.step(named).double(), exact, rtol=2 * unit, atol=1e-6)
    assert all(state.residual is None for state in simulated.states)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "spec",
    [
        *("int8:error_feedback=1", "int4", "onebit", "int4:residual_bits=8", "hosts+int8:error_feedback=1"),
        *("hosts:inside=int8+int4", "hosts:inside=bf16+onebit:error_feedback=1"),
    ],
)
def test_what_is_not_finite_reaches_the_owner_and_all_ranks_hear_of_it(spec, bad):
    simulated = SimulatedRanks(spec, 4, per_host=2 if spec.startswith("hosts") else 1)
    fine = [wholes(rank) for rank in range(4)]
    simulated.step(fine)
    assert all(bool(state.finite.everywhere) for state in simulated.states)
    for state in simulated.states:
        Leaves(state, versioned=True).end_step(keep=True)
    before = [each.clone() for each in simulated.held()]
    fine[2]["b"][6] = bad
    mean = simulated.layouts[0].joined(simulated.step(fine))
    assert not mean["b"][6].isfinite()
    for state, old in zip(simulated.states, before, strict=True):
        assert not state.finite.everywhere
        Leaves(state).undo()
        assert torch.equal(state.residual.layout.spread(state.residual.wide()), old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", ["none", "bf16", "int8", "int4"])
def test_all_ranks_gather_the_same_rows_their_own_too(spec, dtype):
    ranks, row = 3, 300
    mine = [torch.randn(row, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(ranks)]
    outs = [torch.zeros(ranks * row, dtype=dtype) for _ in range(ranks)]
    for rank, out in enumerate(outs):
        out.view(ranks, row)[rank] = mine[rank]
    built, whole = weight_gather(spec), layout((ranks * row,), dtype=dtype, world_size=ranks)
    kinds = [WeightKind(dtype, ShardLayout(placed(whole, rank=rank), (0,))) for rank in range(ranks)]
    simulate([built.gather(out.view(ranks, row)[rank], out, kinds[rank]) for rank, out in enumerate(outs)])
    assert all(torch.equal(out, outs[0]) for out in outs)
    largest = torch.stack(mine).abs().max().item()
    error = (outs[0] - torch.cat(mine)).abs().max().item()
    assert error <= {"none": 0, "bf16": largest / 256, "int8": largest / 127, "int4": largest / 8}[spec] * 1.01
    assert (error == 0) == (spec == "none" or (spec, dtype) == ("bf16", torch.bfloat16))


def test_a_residual_is_saved_in_the_shapes_of_whole_parameters_and_loaded_on_any_number_of_ranks():
    simulated = SimulatedRanks("int4", 4)
    simulated.step([wholes(rank) for rank in range(4)])
    saved = save(simulated.states[1])
    assert {name: fields["residual"].shape for name, fields in saved.items()} == dict(zip("abc", SHAPES, strict=True))
    other = simulated.reduction.init(layouts(2)[0])
    Leaves(other).load(saved)
    assert all(torch.equal(save(other)[name]["residual"], saved[name]["residual"]) for name in saved)


@pytest.mark.parametrize(
    ("make", "spec", "words"),
    [
        (shard_sum, "powersgd", "no rank has whole"),
        (shard_sum, "topk", "shards take bf16, fp16, hosts, int2, int4, int8, none, onebit"),
        (weight_gather, "bf16+topk:k=3", "shards take bf16|packs its own bytes"),
        (shard_sum, "bf16+powersgd", "no rank has whole"),
        (weight_gather, "int8:rounding=stochastic", "to the nearest"),
        (weight_gather, "int4:residual_bits=8", "weights have none: leave it out"),
        (shard_sum, "int8:momentum=0.9", "with block, rounding and error_feedback"),
        (shard_sum, "int9", "unknown compressor"),
        (shard_sum, "int4:residual_bits=4", "residual_bits is 32, 16 or 8, got 4"),
        (shard_sum, "int4:residual_bits=abc", "residual_bits takes int, got 'abc'"),
        (shard_sum, "none:residual_bits=8", "has no option 'residual_bits'"),
        (shard_sum, "int4:error_feedback=0,residual_bits=8", "which is off: add error_feedback=true, or leave it out"),
        (shard_sum, "int4:inside=int8", "inside is an option of hosts"),
        (shard_sum, "hosts:inside=onebit+int4", "none, bf16, fp16, int8 or int4"),
        (shard_sum, "hosts:inside=powersgd+int4", "no rank has whole"),
        (shard_sum, "hosts+hosts+int4", "no rank has whole"),
        (shard_sum, "hosts:ranks=0+int4", "hosts:ranks is at least 1"),
        (weight_gather, "hosts:inside=int8+int4", "no option 'inside'"),
        (weight_gather, "hosts+topk", "no rank has whole"),
    ],
)
def test_other_methods_are_refused_with_the_way_out(make, spec, words):
    with pytest.raises(ValueError, match=words):
        make(spec)


OF_PARAMETERS = ["int8", "int4:error_feedback=false", "int4", "int4:residual_bits=8", "int4:residual_bits=16", "int2"]
OF_PARAMETERS += ["int2:residual_bits=8", "onebit", "onebit:rotate=false", "onebit:rotate=false,residual_bits=8"]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("spec", OF_PARAMETERS)
def test_a_parameter_with_smaller_gradients_has_a_smaller_mean_and_changes_no_other(spec, ranks):
    def means(smaller=None):
        simulated, found = SimulatedRanks(spec, ranks), []
        for step in range(3):
            named = [wholes(rank + step * ranks) for rank in range(ranks)]
            for each in named if smaller else ():
                each[smaller].mul_(2.0**-13)
            found.append(simulated.layouts[0].joined(simulated.step(named)))
        return found

    expected = means()
    for name in expected[0]:
        for step, (mean, plain) in enumerate(zip(means(name), expected, strict=True)):
            for other in mean:
                scale = 2.0**-13 if other == name else 1.0
                assert torch.equal(mean[other], plain[other] * scale), (step, name, other)


@pytest.mark.parametrize("spec", ["int8", "int4:send=weights", "onebit:send=weights"])
def test_a_parameter_with_smaller_weights_is_gathered_as_exactly_as_others(spec):
    def gathered(smaller=None):
        named, places = wholes(5), layouts(3)
        if smaller:
            named[smaller].mul_(2.0**-13)
        rows = flat_of(places[0], named).view(3, -1)
        outs, built = [torch.full((rows.numel(),), torch.nan) for _ in rows], weight_gather(spec)
        simulate(
            [built.gather(row, out, WeightKind(row.dtype, at)) for row, out, at in zip(rows, outs, places, strict=True)]
        )
        assert all(torch.equal(out, outs[0]) for out in outs)
        return places[0].joined(outs[0])

    expected = gathered()
    for name in expected:
        for other, weights in gathered(name).items():
            assert torch.equal(weights, expected[other] * 2.0**-13 if other == name else expected[other]), (name, other)


@pytest.mark.parametrize("feedback", ["error_feedback=false", "error_feedback=1"])
def test_a_shard_that_is_shorter_than_others_makes_no_sign_smaller(feedback):
    """Shards of five rows on four ranks have 2, 2, 1 and 0 rows: the zeros behind count for no mean."""
    ranks, spec = 4, f"onebit:rotate=false,{feedback}"
    named = [wholes(rank) for rank in range(ranks)]
    simulated = SimulatedRanks(spec, ranks)
    mean = simulated.layouts[0].joined(simulated.step(named))
    for name in ("a", "b"):
        rows = -(-len(named[0][name]) // ranks)
        for first in range(0, len(named[0][name]), rows):
            shards = [each[name][first : first + rows] for each in named]
            expected = sum(shard.abs().mean() * torch.where(shard >= 0, 1, -1) for shard in shards) / ranks
            assert torch.allclose(mean[name][first : first + rows], expected, atol=1e-6)


def accepted(function, spec):
    try:
        function(spec)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("function", [shard_sum, weight_gather])
def test_an_unknown_compressor_is_answered_by_the_names_that_shards_take(function):
    with pytest.raises(ValueError, match="unknown compressor 'in4'") as caught:
        function("in4")
    named = str(caught.value).partition("there are: ")[2].split(", ")
    assert named == [name for name in compressors() if accepted(function, name)]
    assert "powersgd" not in named
