"""The mean of sparse rows whose indices ascend, as `select_largest` writes them, against numpy."""

import numpy
import pytest
import torch

from gradwire.kernels import scatter_mean, select_largest

pytestmark = pytest.mark.usefixtures("backend")
SIZE = 20_003  # more than one tile of a program


def payloads(voters, rows, k, length, dtype, index):
    """What voters send of vectors that are large in some places and share many of them; rows without elements are zeros."""
    generator = torch.Generator().manual_seed(voters)
    indices = torch.full((voters, rows, k), -7, dtype=index)
    values = torch.full((voters, rows, k), torch.nan, dtype=dtype)
    shared = torch.rand(SIZE, generator=generator) < 0.02
    for voter in range(voters):
        grad = torch.randn(SIZE, generator=generator) * (1 + 9 * shared)
        select_largest(grad, None, indices[voter], values[voter], length)
    return indices, values


def mean_of(indices, values, length):
    """In float32, voter after voter."""
    share, dense = numpy.float32(1 / len(indices)), numpy.zeros(SIZE + 1, dtype=numpy.float32)
    starts = numpy.arange(indices.shape[1])[:, None] * length
    for places, numbers in zip(indices.long().numpy(), values.float().numpy(), strict=True):
        there = numbers != 0
        dense[(places + starts)[there]] += (numbers * share)[there]
    return dense[:SIZE]


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("voters", "rows", "length", "k"),
    [
        (1, 1, SIZE, 200),
        (3, 1, SIZE, 1_000),
        (2, 1, SIZE + 5, SIZE + 2),
        (5, 3, 9_000, 4_321),
        (2, 5, 8_192, 8_000),
        (3, 2, 16_384, 1),
        (2, 3, 8_000, 70),
    ],
)
def test_the_mean_of_ascending_rows_is_that_of_any_order_to_the_bit(voters, rows, length, k, dtype, index):
    indices, values = payloads(voters, rows, k, length, dtype, index)
    found, expected = torch.full((SIZE,), torch.nan), torch.full((SIZE,), torch.nan)
    scatter_mean(indices, values, found, length, ascending=True)
    scatter_mean(indices, values, expected, length)
    assert torch.equal(found, expected)
    assert numpy.allclose(found.numpy(), mean_of(indices, values, length), rtol=0, atol=1e-6)


def test_rows_of_a_payload_that_holds_other_things_too_are_read_where_they_lie():
    rows = torch.full((2, 1, 60), 99, dtype=torch.uint8)
    indices, values = rows[..., :12].view(torch.int32), rows[..., 16:28].view(torch.float32)
    indices.copy_(torch.tensor([[[0, 8_191, 8_192]], [[8_191, 8_192, 9_999]]]))
    values.copy_(torch.tensor([[[1.0, 2.0, 3.0]], [[4.0, 5.0, torch.inf]]]))
    out = torch.full((10_000,), torch.nan)
    scatter_mean(indices, values, out, 10_000, ascending=True)
    assert out[[0, 8_191, 8_192, 9_999]].tolist() == [0.5, 3.0, 4.0, torch.inf]
    assert out.count_nonzero() == 4


def test_nothing_sent_is_zero():
    out = torch.full((10_000,), torch.nan)
    nothing = torch.zeros(2, 1, 0, dtype=torch.int32)
    scatter_mean(nothing, nothing.float(), out, 10_000, ascending=True)
    assert not out.any()
