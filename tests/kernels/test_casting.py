"""Changes of number format, against numpy."""

import numpy
import pytest
import torch

from gradwire.kernels import cast_scaled, gather_scaled

from .given import numbers, poisoned

pytestmark = pytest.mark.usefixtures("backend")
SIZES = [0, 1, 7, 8, 9, 1009]
NUMPY = {torch.float16: numpy.float16, torch.float32: numpy.float32, torch.float64: numpy.float64}
# Distance between neighbours, relative to a number: a rounding to nearest errs by half of it.
SPACING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-23, torch.float64: 2**-52}
WIDE = [torch.float32, torch.float64]
NARROW = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("out_dtype", NUMPY, ids=str)
@pytest.mark.parametrize("dtype", NUMPY, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_cast_rounds_to_nearest_even_as_numpy_does(size, dtype, out_dtype, scale):
    source, out = numbers(size, dtype), poisoned(size, out_dtype)
    cast_scaled(source, out, scale)
    expected = (source.double().numpy() * scale).astype(NUMPY[out_dtype])
    assert numpy.array_equal(out.numpy(), expected)


@pytest.mark.parametrize("scale", [1 / 3, 1 / 7])
@pytest.mark.parametrize("out_dtype", [*WIDE, *NARROW], ids=str)
@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=str)
def test_a_product_is_taken_in_a_dtype_that_holds_both_then_rounded(dtype, out_dtype, scale):
    source, out = numbers(1009, dtype), poisoned(1009, out_dtype)
    cast_scaled(source, out, scale)
    expected = source.double() * scale
    product = SPACING[torch.promote_types(dtype, out_dtype)]
    allowed = (SPACING[out_dtype] / 2 + product) * expected.abs() + 2.0**-25
    assert ((out.double() - expected).abs() <= allowed).all()


def test_bfloat16_rounds_to_nearest_with_ties_to_even():
    source = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)])
    out = poisoned(4, torch.bfloat16)
    cast_scaled(source, out, 1.0)
    assert out.tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]


def test_scaling_comes_before_narrowing_so_that_a_mean_in_range_survives():
    source, out = torch.tensor([131072.0, -196608.0, 3e-8]), poisoned(3, torch.float16)
    cast_scaled(source, out, 0.25)
    assert out.tolist() == [32768.0, -49152.0, 0.0]


def test_scaling_comes_after_widening_so_that_nothing_small_is_lost():
    source, out = torch.tensor([6e-8, 60000.0], dtype=torch.float16), poisoned(2, torch.float32)
    cast_scaled(source, out, 0.25)
    assert out.tolist() == [2.0**-26, 15000.0]


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=str)
@pytest.mark.parametrize("out_dtype", [*WIDE, *NARROW], ids=str)
def test_infinities_and_nan_arrive(dtype, out_dtype, scale):
    out = torch.zeros(3, dtype=out_dtype)
    cast_scaled(torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype), out, scale)
    assert numpy.array_equal(out.double().numpy(), [numpy.inf, -numpy.inf, numpy.nan], equal_nan=True)


def test_beyond_the_range_of_float16_a_number_becomes_infinite_for_the_skip_to_see():
    out = torch.zeros(2, dtype=torch.float16)
    cast_scaled(torch.tensor([1e6, -1e6]), out, 1.0)
    assert out.tolist() == [torch.inf, -torch.inf]


def test_the_source_is_left_as_it_is():
    source = numbers(9, torch.float32)
    before = source.clone()
    for out in (poisoned(9, torch.float16), poisoned(9, torch.float64)):
        cast_scaled(source, out, 0.3)
    assert torch.equal(source, before)


@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=str)
def test_gradients_are_gathered_each_at_its_place_as_torch_scales_them(dtype, scale):
    sizes, places = [3, 1, 0, 1008, 300], [301, 1312, 0, 304, 1]
    out = poisoned(1314, dtype)
    sources = [numbers(size, dtype, seed).view(-1, 3 if size % 3 == 0 else 1) for seed, size in enumerate(sizes)]
    gather_scaled(out, sources, places, scale)
    for source, place in zip(sources, places, strict=True):
        assert torch.equal(out[place : place + source.numel()], source.view(-1) * scale)
    assert out[[0, -1]].isnan().all()


def test_a_gradient_that_is_at_its_place_already_is_scaled_there():
    out = numbers(2000, torch.float32)
    expected = torch.cat([out[:1500] * 0.5, out[1500:]])
    gather_scaled(out, [out[500:1500], out[:500]], [500, 0], 0.5)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_gradients_with_gaps_or_of_another_sign_in_memory_are_gathered_as_what_they_stand_for(scale):
    out = poisoned(13, torch.float32)
    apart, negative = numbers(12, torch.float32).view(4, 3)[:, :2], torch._neg_view(numbers(5, torch.float32))
    gather_scaled(out, [apart, negative], [0, 8], scale)
    assert torch.equal(out, torch.cat([apart.reshape(-1), negative]) * scale)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_gradients_without_memory_of_subclasses_and_with_a_graph_are_gathered_as_what_they_stand_for(scale):
    out = poisoned(13, torch.float32)
    zeros, given = torch._efficientzerotensor(4), numbers(6, torch.float32).requires_grad_()
    subclass = torch.nn.Parameter(numbers(3, torch.float32, 1))
    with torch.no_grad():
        gather_scaled(out, [zeros, subclass, given * 2], [0, 4, 7], scale)
    assert torch.equal(out, torch.cat([torch.zeros(4), subclass, given * 2]) * scale)


def test_nothing_is_gathered_from_nothing():
    out = numbers(3, torch.float32)
    gather_scaled(out, [], [], 0.5)
    assert torch.equal(out, numbers(3, torch.float32))
