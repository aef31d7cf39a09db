"""What is particular to the Triton backend, in its interpreter: long rows, large blocks, many ranks, and when it runs."""

import os
from functools import partial

import numpy
import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Factors, Matrix, triton_kernels
from gradwire.kernels.quantization import FORMATS

from ..gpu.cases import HARD, check_products, check_quantized, check_selection, check_signs, numbers, same
from ..residuals import in_place

BACKEND = {backend.name: backend for backend in kernels.backends()}[triton_kernels.NAME]
NAN = torch.nan
SIZE = 9_001  # two tiles and a bit

pytestmark = pytest.mark.skipif(
    not (BACKEND.available and triton_kernels.INTERPRETED), reason=BACKEND.reason or "it is compiled, not interpreted"
)


@pytest.fixture(autouse=True)
def triton():
    with kernels.use_backend("triton"):
        yield


def test_the_interpreter_is_for_cpu_tensors_and_runs_on_request_only():
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert (BACKEND.device, BACKEND.automatic) == ("cpu", False)
    assert kernels.cast_scaled.chosen("cpu") == "triton"
    with kernels.use_backend():
        assert kernels.cast_scaled.chosen("cpu") != "triton"


def test_every_operation_has_a_triton_kernel():
    assert [name for name, each in kernels.operations().items() if "triton" not in each.implementations] == []


@pytest.mark.parametrize("k", [1, 300, SIZE - 1])
@pytest.mark.parametrize("kind", HARD)
def test_the_selection_from_a_long_row_is_that_of_the_reference_whatever_the_sample_said(kind, k, monkeypatch):
    """With little room for candidates, so that some kinds spill."""
    from gradwire.kernels.triton_kernels import long_rows

    monkeypatch.setattr(long_rows, "SPARE", 100)
    check_selection("cpu", HARD[kind](SIZE).float(), torch.zeros(SIZE), k, SIZE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("k", "rows"), [(40, 3), (5_500, 2)])
def test_several_long_rows_the_last_short_or_empty_are_selected_from_by_themselves(k, rows, dtype):
    check_selection("cpu", numbers(SIZE, dtype), None, k, 5_000, dtype, torch.int64, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "length", "block"), [(20_003, 10_240, 10_240), (9_000, 9_000, 9_000), (99, 24, 24)])
def test_blocks_of_any_size_are_encoded_as_by_the_reference(size, length, block, dtype):
    check_signs(size, length, block, dtype, voters=(1, 2))  # of more, means differ in the last bit


@pytest.mark.parametrize("rank", [1, 9, pytest.param(70, marks=pytest.mark.slow)])
def test_products_of_all_ranks_are_those_of_float64_also_where_a_matrix_is_split(rank):
    """The second matrix is split for P, the third for Q; aligned to 4 elements or not."""
    shapes, start = [(3, 5), (4 + rank, 1100 + 4 * rank), (700, 7 + rank)], 4 * (rank % 2)
    starts = [start + sum(rows * columns for rows, columns in shapes[:index]) for index in range(4)]
    factors = Factors(tuple(Matrix(at, *shape, min(rank, *shape)) for at, shape in zip(starts, shapes, strict=False)))
    check_products(factors, starts[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [2, 20])
@pytest.mark.parametrize("held", [False, True])
def test_products_of_16_bit_gradients_are_computed_in_float32_and_rounded_once(rank, dtype, held):
    factors = Factors((Matrix(3, 40, 56, rank),))
    grad, q = numbers(3 + 40 * 56, dtype), numbers(factors.right_offsets[-1], seed=2)
    residual, p = numbers(grad.numel(), seed=1) if held else None, torch.full((40 * rank,), NAN)
    total = grad.double() + residual.double() if held else grad.double()
    kernels.low_rank_left(grad, in_place(residual), factors, q, p)
    matrix, wide_q = next(factors.full(total)), next(factors.right(q.double()))
    assert (p.view(rank, 40) - wide_q @ matrix.T).norm() <= 2e-6 * (wide_q @ matrix.T).norm()
    kernels.low_rank_right(residual if held else grad, factors, p, q)
    product = next(factors.left(p.double()))
    assert (q.view(rank, 56) - product @ matrix).norm() <= 2e-6 * (product @ matrix).norm()
    p, q = p / p.norm(), q / q.norm() * 9
    kernels.low_rank_finish(grad, residual, factors, p, q)
    expected = next(factors.left(p.double())).T @ next(factors.right(q.double()))
    sent = next(factors.full(grad)).double()
    assert (sent - expected).abs().max() <= torch.finfo(dtype).eps / 2 * expected.abs().max() * 1.01
    if held:
        assert (next(factors.full(residual)) - (matrix - sent)).abs().max() <= 1e-6 * matrix.abs().max()


def test_a_sum_over_nothing_is_zero():
    p, q = torch.full((5,), NAN), torch.full((7,), NAN)
    kernels.low_rank_left(torch.empty(0), None, Factors((Matrix(0, 5, 0, 1),)), torch.empty(0), p)
    kernels.low_rank_right(torch.empty(0), Factors((Matrix(0, 0, 7, 1),)), torch.empty(0), q)
    assert not p.any()
    assert not q.any()


def test_more_vectors_than_elements_cannot_be_orthonormal():
    with pytest.raises(ValueError, match="3 vectors of 2 elements cannot be orthonormal"):
        kernels.orthogonalize(torch.ones(6), Factors((Matrix(0, 2, 9, 3),)))


def test_normalize_takes_zero_vectors_from_those_before():
    factors = Factors((Matrix(0, 2, 3, 2),))
    q, previous = torch.tensor([0.0, 0.0, 0.0, 0.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    kernels.normalize(q, factors, previous)
    assert numpy.allclose(q.numpy(), [1.0, 2.0, 3.0, 0.0, 0.6, 0.8])


def test_an_index_from_nowhere_writes_nowhere():
    out = torch.zeros(16)
    kernels.scatter_mean(torch.tensor([[[-1, 99, 3]]]), torch.ones(1, 1, 3), out, 16)
    assert out.tolist() == [0.0, 0.0, 0.0, 1.0, *[0.0] * 12]


@pytest.mark.parametrize("seed", [-1, 1 << 40])
@pytest.mark.parametrize("bits", FORMATS)
def test_quantized_blocks_are_those_of_the_reference_to_the_bit(bits, seed):
    check_quantized(SIZE, 3200, 128, torch.float32, bits, seed, voters=(1, 2))


@pytest.mark.parametrize(
    ("operation", "codes", "rest"), [("sign_unpack_mean", torch.uint8, ()), ("dequantize_mean", torch.int8, (8,))]
)
def test_large_vectors_are_decoded_and_large_blocks_that_are_rotated_are_left_to_the_reference(operation, codes, rest):
    known = kernels.operations()[operation]
    unknown = partial(known.limits["triton"].unknown, known.contract)
    given = torch.ones(1, 1, 2), torch.zeros(1, 1, 4096, dtype=codes), torch.ones(32_768)
    assert not unknown(given)
    assert not unknown((*given, *rest, None, torch.ones(8192)))
    assert "blocks above 8192" in unknown((*given, *rest, None, torch.ones(16_384)))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("size", [1, 63, 64, 8191, 8193, SIZE])
@pytest.mark.parametrize("block", [1, 8, 128, 8192, 16_384])
def test_rotated_blocks_are_those_of_the_reference_to_the_bit(block, size, back):
    signs = numbers(block, seed=1).sign()
    found, expected = numbers(size), numbers(size)
    kernels.rotate_blocks(found, signs, back)
    kernels.rotate_blocks.reference(expected, signs, back)
    assert same(found, expected)
