"""Sums in float16: what is cut so that they stay finite, and what is not."""

import dataclasses
import itertools
import random

import pytest
import torch

from gradwire.compress import Dense, Float16, Partition, PowerSGD, Simulation, all_reduce, compressor, reduce_scatter

from ..given import gradients, layout

RANKS = range(1, 17)
LARGEST = torch.finfo(torch.float16).max


@dataclasses.dataclass(frozen=True)
class Factors:
    """Sends less than the gradient, as factors are: their overflow is cut."""

    request: object

    def init(self, layout):
        return None

    def reduce(self, grad, state, residual=None):
        return (yield from self.request(grad[:-1]))


def sent(ranks, numbers, request):
    """What the ranks' programs give to their collective, in float16, for factors of these numbers."""
    within, built = layout((len(numbers) + 1,), world_size=ranks), Float16(Factors(request))
    padded = torch.tensor([*numbers, 0.0])
    given = [next(built.reduce(padded.clone(), built.init(within))).tensor for _ in range(ranks)]
    assert all(tensor.dtype == torch.float16 for tensor in given)
    return given


def one_by_one(tensors):
    return list(itertools.accumulate(tensors))[-1]


def by_halves(tensors):
    if len(tensors) == 1:
        return tensors[0]
    middle = len(tensors) // 2
    return by_halves(tensors[:middle]) + by_halves(tensors[middle:])


def by_pairs(tensors):
    while len(tensors) > 1:
        tensors = [sum(tensors[first + 1 : first + 2], tensors[first]) for first in range(0, len(tensors), 2)]
    return tensors[0]


def in_a_random_tree(tensors):
    tensors, dice = list(tensors), random.Random(len(tensors))
    while len(tensors) > 1:
        dice.shuffle(tensors)
        tensors.append(tensors.pop() + tensors.pop())
    return tensors[0]


@pytest.mark.parametrize("order", [one_by_one, by_halves, by_pairs, in_a_random_tree])
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("ranks", RANKS)
def test_sums_of_what_was_cut_are_finite_in_any_order(ranks, op, order):
    numbers = [6e4, -6e4, 65504.0, 65519.0, 65520.0, 1e6, -1e30, *(LARGEST / n for n in range(1, 17))]
    given = sent(ranks, numbers, lambda tensor: all_reduce(tensor, op))
    assert order(given).isfinite().all()


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_that_are_summed_are_cut_likewise(ranks):
    given = sent(ranks, [1e6] * 2 * ranks, lambda tensor: reduce_scatter(tensor.view(ranks, 2)))
    assert one_by_one(given).isfinite().all()


@pytest.mark.parametrize("ranks", RANKS)
def test_hardly_more_is_cut_than_has_to_be(ranks):
    total = one_by_one([tensor.double() for tensor in sent(ranks, [1e6], lambda tensor: all_reduce(tensor, "sum"))])
    assert 0.98 * LARGEST < total.item() <= LARGEST


@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_not_finite_is_not_cut(ranks):
    given = sent(ranks, [torch.inf, -torch.inf, torch.nan], all_reduce)
    assert given[0][:2].tolist() == [torch.inf, -torch.inf]
    assert not one_by_one(given).isfinite().any()


@pytest.mark.parametrize("scale", [6e4, 6.5e4, 1e6])
@pytest.mark.parametrize("ranks", RANKS)
def test_large_gradients_do_not_overflow_the_factors_of_powersgd(ranks, scale):
    """Of one sign and alike on all ranks: every element of the sum is as large as it can be."""
    within = layout((16, 12), world_size=ranks)
    simulation = Simulation(compressor("fp16+powersgd:rank=1,min_compression_rate=0"), within)
    for _ in range(2):
        for average in simulation.step([torch.full((within.numel,), scale) for _ in range(ranks)]):
            assert average.isfinite().all()


@pytest.mark.parametrize("spec", ["fp16+randomk", "fp16+chunktopk", "fp16+acp-powersgd"])
def test_what_is_forgotten_once_it_is_sent_overflows_instead_of_being_cut(spec):
    for average in Simulation(compressor(spec), layout((64, 64))).step([torch.full((64 * 64,), 1e5)] * 2):
        assert not average.isfinite().all()


@pytest.mark.parametrize(
    "built",
    [
        compressor("fp16+powersgd:rank=1"),
        Float16(Partition((("b", Dense()), ("v", PowerSGD(rank=1))), PowerSGD(rank=1))),
    ],
    ids=["vectors", "groups"],
)
def test_what_is_sent_whole_beside_factors_overflows_as_whole_gradients_do(built):
    within = layout((64, 64), (8,), (64, 64), names=["w", "b", "v"])
    grad = torch.cat([torch.ones(64 * 64), torch.full((8,), 1e6), torch.ones(64 * 64)])
    average = Simulation(built, within).step([grad.clone(), grad.clone()])[0]
    assert average.isinf().nonzero().flatten().tolist() == list(range(64 * 64, 64 * 64 + 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_means_of_sums_in_float32_are_rounded_twice_however_many_ranks_there_are(ranks, name, dtype):
    within = layout((37, 5), (3,), dtype=dtype, world_size=ranks)
    given = gradients(within)
    unit = torch.finfo({"bf16": torch.bfloat16, "fp16": torch.float16}[name]).eps / 2
    unit = max(unit, torch.finfo(dtype).eps / 2)
    mean, sizes = (sum(each.double() for each in numbers) / ranks for numbers in (given, [g.abs() for g in given]))
    bound = unit * (sizes + mean.abs()) * 1.01 + 1e-7
    for average in Simulation(compressor(f"{name}:sum=float32"), within).step([each.clone() for each in given]):
        assert ((average.double() - mean).abs() <= bound).all()
