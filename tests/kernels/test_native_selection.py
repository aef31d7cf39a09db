"""The native selection and the way back, against the reference."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Residual

from ..gpu.cases import GRADS, HARD, NAN, check_selection, numbers, same
from ..residuals import in_place
from .native_given import SIZES, native_of, needs_native, unaligned

pytestmark = needs_native


@pytest.mark.parametrize("k", [1, 300, 3_001, 100_000, 200_002])
@pytest.mark.parametrize("kind", HARD)
def test_the_selection_is_that_of_the_reference_whatever_the_sample_said(threads, kind, k):
    check_selection("cpu", HARD[kind](200_003).float(), torch.zeros(200_003), k, 200_003)


@pytest.mark.parametrize("fill", [0.0, 2.0])
def test_threads_together_never_collect_more_than_there_is_room_for(threads, fill):
    grad, k = torch.full((1_000_000,), fill), 100_000
    for _ in range(8):  # who collects how much is another each time
        indices, values = torch.full((1, k), -1, dtype=torch.int32), torch.full((1, k), NAN)
        native_of(kernels.select_largest)(grad, in_place(torch.zeros_like(grad)), indices, values, len(grad))
        assert torch.equal(indices[0], torch.arange(k, dtype=torch.int32))


@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("value_dtype", GRADS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_selections_and_means_are_those_of_the_reference(level, size, value_dtype, grad_dtype):
    grad, length, k, found = unaligned(numbers(size, grad_dtype)), -(-size // 2), 50, []
    for backend in ("native", "reference"):
        residual = unaligned(numbers(size, seed=1))
        indices = torch.full((2, k), -1, dtype=torch.int64)
        values, out = torch.full((2, k), NAN, dtype=value_dtype), torch.full((size,), NAN)
        with kernels.use_backend(backend):
            kernels.select_largest(grad, in_place(residual), indices, values, length)
            kernels.scatter_mean(indices.unsqueeze(0), values.unsqueeze(0), out, length)
        found.append((indices, values, residual, out))
    assert all(map(same, *found))


@pytest.mark.parametrize("length", [70, 5_000, 100_000])
def test_rows_are_selected_from_on_any_number_of_threads(threads, length):
    check_selection("cpu", numbers(200_003), numbers(200_003, seed=1), 5, length, index=torch.int64)


def test_nothing_selected_leaves_all_in_the_residual():
    residual = Residual(torch.ones(9), torch.full((9,), NAN))
    indices, values = torch.zeros(1, 0, dtype=torch.int32), torch.zeros(1, 0)
    native_of(kernels.select_largest)(numbers(9), residual, indices, values, 9)
    assert torch.equal(residual.after, numbers(9) + 1)


def sparse(kind, length):
    """Places (voters, rows, k) in rows of a length."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, length, (3, 4, 60), generator=generator)
    if kind == "in order":
        places = places.sort().values
    if kind == "padded":
        places = torch.where(torch.arange(60) < 50, places.sort().values, 0)
    if kind == "beyond":
        places = places.sort().values * 2
    return places


@pytest.mark.parametrize("dtype", GRADS, ids=str)
@pytest.mark.parametrize("length", [70, 30_000, 600_000])
@pytest.mark.parametrize("kind", ["in order", "padded", "in any order", "beyond"])
def test_means_of_sparse_rows_are_those_of_the_reference(level, threads, kind, length, dtype):
    places, values = sparse(kind, length), numbers(3 * 4 * 60, dtype, 1).view(3, 4, 60)
    if kind == "padded":
        values = values * (torch.arange(60) < 50)
    sizes = (length * 4 - 3, length * 3 - 5, length * 5)  # in the last row but one; not all rows; more than all
    for size in sizes if length < 600_000 else sizes[:1]:
        found, expected = unaligned(torch.full((size,), NAN)), torch.empty(size)
        kernels.scatter_mean(places, values, found, length)
        kernels.scatter_mean.reference(places, values, expected, length)
        assert torch.allclose(found, expected, rtol=2e-6, atol=0)


def test_an_index_from_nowhere_writes_nowhere():
    out = torch.zeros(16)
    with pytest.raises(IndexError, match="-1"):
        native_of(kernels.scatter_mean)(torch.tensor([[[-1]]]), torch.ones(1, 1, 1), out, 16)
    native_of(kernels.scatter_mean)(torch.tensor([[[99]]]), torch.ones(1, 1, 1), out, 16)
    assert out.tolist() == [*[0.0] * 15, 1.0]


def test_an_index_from_nowhere_among_many_is_found_on_any_thread(threads):
    places = torch.arange(200_000).expand(3, 1, -1).clone()
    places[2, 0, 77] = -5
    with pytest.raises(IndexError, match="-5"):
        native_of(kernels.scatter_mean)(places, torch.ones(3, 1, 200_000), torch.empty(200_000), 200_000)
