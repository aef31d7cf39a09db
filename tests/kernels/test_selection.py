"""Selection of the largest elements and the way back, against numpy."""

import numpy
import pytest
import torch

from gradwire.kernels import scatter_mean, select_largest

from ..residuals import in_place
from .given import numbers

pytestmark = pytest.mark.usefixtures("backend")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [1, 7, 8, 9, 1009]
INF, NAN = torch.inf, torch.nan


def select(grad, k, length=None, residual=None, dtype=torch.float32, index=torch.int32):
    """Indices and values of all rows, written over garbage."""
    length = length or grad.numel()
    rows = -(-grad.numel() // length)
    indices = torch.full((rows, k), -7, dtype=index)
    values = torch.full((rows, k), NAN, dtype=dtype)
    select_largest(grad, in_place(residual), indices, values, length)
    return indices, values


def largest(row, k):
    """Positions of the k largest magnitudes, ascending, lower position first among equals."""
    magnitude = numpy.nan_to_num(numpy.abs(row), nan=numpy.inf)
    return numpy.sort(numpy.lexsort((numpy.arange(len(row)), -magnitude))[:k])


def oracle(grad, k, length):
    """Indices and values in float64 of rows of `length`."""
    rows = [grad[start : start + length] for start in range(0, len(grad), length)]
    indices, values = numpy.zeros((len(rows), k), dtype=int), numpy.zeros((len(rows), k))
    for number, row in enumerate(rows):
        chosen = largest(row, k)
        indices[number, : len(chosen)], values[number, : len(chosen)] = chosen, row[chosen]
    return indices, values


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_largest_magnitudes_are_taken_in_ascending_order(size, dtype, index):
    grad = numbers(size, dtype)
    for k in {1, 2, size - 1, size, size + 3} - {0}:
        indices, values = select(grad, k, dtype=torch.float64, index=index)
        expected = oracle(grad.double().numpy(), k, size)
        assert numpy.array_equal(indices.numpy(), expected[0])
        assert numpy.array_equal(values.numpy(), expected[1])


@pytest.mark.parametrize("length", [1, 8, 100, 1008, 2000])
@pytest.mark.parametrize("k", [1, 3, 150])
def test_each_row_is_selected_from_by_itself_and_the_last_may_be_short(length, k):
    grad = numbers(1009, torch.float32)
    indices, values = select(grad, k, length)
    expected = oracle(grad.numpy(), k, length)
    assert numpy.array_equal(indices.numpy(), expected[0])
    assert numpy.array_equal(values.numpy(), expected[1])


def test_rows_past_the_end_are_empty():
    indices, values = torch.full((3, 2), -7, dtype=torch.int32), torch.full((3, 2), NAN)
    select_largest(torch.tensor([1.0, 2.0, 3.0]), None, indices, values, 2)
    assert indices.tolist() == [[0, 1], [0, 0], [0, 0]]
    assert values.tolist() == [[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]]


def test_of_equal_magnitudes_the_lower_index_is_taken():
    grad = torch.tensor([1.0, -2.0, 2.0, 0.0, -2.0, 2.0, 3.0])
    assert [select(grad, k)[0].tolist() for k in (1, 2, 3, 4)] == [[[6]], [[1, 6]], [[1, 2, 6]], [[1, 2, 4, 6]]]
    assert select(torch.zeros(1009), 5)[0].tolist() == [[0, 1, 2, 3, 4]]
    assert select(torch.full((1009,), -0.5), 3)[0].tolist() == [[0, 1, 2]]


def test_coarse_numbers_with_many_ties_match_the_oracle():
    grad = numbers(1009, torch.float32).mul_(2).round_()
    for k in (1, 10, 100, 500, 1000):
        assert numpy.array_equal(select(grad, k)[0].numpy(), oracle(grad.numpy(), k, 1009)[0])


@pytest.mark.parametrize(
    ("grad_dtype", "dtype"),
    [*((narrow, torch.float32) for narrow in DTYPES[:3]), *((any_dtype, torch.float64) for any_dtype in DTYPES)],
    ids=str,
)
def test_what_is_not_selected_waits_in_the_residual(grad_dtype, dtype):
    for size in SIZES:
        grad, held = numbers(size, grad_dtype), numbers(size, dtype, seed=1)
        residual, corrected = held.clone(), (held + grad).numpy()
        indices, values = select(grad, 3, residual=residual, dtype=dtype)
        chosen = largest(corrected, 3)
        assert numpy.array_equal(indices.numpy()[0, : len(chosen)], chosen)
        assert numpy.array_equal(values.numpy()[0, : len(chosen)], corrected[chosen])
        corrected[chosen] = 0
        assert numpy.array_equal(residual.numpy(), corrected)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4])
def test_conservation_what_float16_rounds_away_stays_in_the_residual_to_the_bit(scale):
    grad, held = numbers(1009, torch.float32).mul_(scale), numbers(1009, torch.float32, 1).mul_(scale)
    residual = held.clone()
    indices, values = select(grad, 900, length=512, residual=residual, dtype=torch.float16)
    sent = numpy.zeros(1024)
    numpy.add.at(
        sent, (indices.long() + torch.tensor([[0], [512]])).numpy().reshape(-1), values.double().numpy().ravel()
    )
    assert numpy.array_equal(residual.double().numpy() + sent[:1009], (held + grad).double().numpy())


def test_float16_values_are_those_of_numpy():
    grad = numbers(1009, torch.float32)
    indices, values = select(grad, 50, dtype=torch.float16)
    assert numpy.array_equal(values.numpy()[0], grad.numpy()[indices.numpy()[0]].astype(numpy.float16))


def test_numbers_beyond_float16_are_clamped_and_the_excess_waits():
    residual = torch.zeros(4)
    _, values = select(torch.tensor([1e5, -1e5, 65519.0, 1.0]), 3, residual=residual, dtype=torch.float16)
    assert values.tolist() == [[65504.0, -65504.0, 65504.0]]
    assert residual.tolist() == [34496.0, -34496.0, 15.0, 1.0]


def test_float64_beyond_float32_is_clamped():
    _, values = select(torch.tensor([1e300, -1e300], dtype=torch.float64), 2)
    assert values.tolist() == [[torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 5, 8])
def test_infinities_and_nan_are_selected_first_and_stay_what_they_are(bad, place, dtype):
    grad, residual = numbers(9, torch.float32), torch.zeros(9)
    grad[place] = bad
    indices, values = select(grad, 1, residual=residual, dtype=dtype)
    assert indices.tolist() == [[place]]
    assert numpy.array_equal(values.double().numpy(), [[bad]], equal_nan=True)


def test_more_nan_than_places_are_selected_from_the_front():
    indices, values = select(torch.full((9,), NAN), 2)
    assert indices.tolist() == [[0, 1]]
    assert values.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("voters", "length"), [(1, 1009), (2, 1009), (3, 100), (4, 7)])
def test_the_mean_over_voters_is_that_of_the_dense_vectors(voters, length, value_dtype, dtype):
    k, dense = 5, numpy.zeros(1009)
    payloads = [select(numbers(1009, torch.float32, seed), k, length, dtype=value_dtype) for seed in range(voters)]
    for indices, values in payloads:
        for row in range(len(indices)):
            for index, value in zip(indices[row].tolist(), values[row].tolist(), strict=True):
                if value:
                    dense[row * length + index] += value / voters
    out = torch.full((1009,), NAN, dtype=dtype)
    scatter_mean(torch.stack([i for i, _ in payloads]), torch.stack([v for _, v in payloads]), out, length)
    assert numpy.allclose(out.double().numpy(), dense, rtol=0, atol=3e-7)


def test_padding_of_rows_past_the_end_lands_nowhere():
    indices = torch.zeros(1, 3, 2, dtype=torch.int32)
    values = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 0.0]]])
    out = torch.full((3,), NAN)
    scatter_mean(indices, values, out, 2)
    assert out.tolist() == [1.0, 0.0, 2.0]


def test_an_infinity_or_nan_of_one_voter_reaches_the_mean():
    values = torch.tensor([[[INF, 1.0]], [[2.0, NAN]]])
    out = torch.zeros(3)
    scatter_mean(torch.tensor([[[0, 1]], [[0, 2]]]), values, out, 3)
    assert out[0] == INF
    assert out[1] == 0.5
    assert out[2].isnan()
