"""Orthonormal bases and unit vectors in C++, on every instruction set."""

import pytest
import torch

from gradwire import kernels

from ..gpu.cases import INF, NAN, numbers
from .native_given import needs_native
from .test_native_low_rank import laid_out

pytestmark = needs_native
SHAPES = [(1, 1, 1), (300, 7, 1), (37, 53, 4), (513, 20, 17), (40, 40, 32), (130, 2500, 5)]  # (rows, columns, rank)


def test_bases_are_orthonormal_and_those_of_the_reference(level, threads):
    factors = laid_out(SHAPES * 9)
    p = numbers(factors.left_offsets[-1])
    expected = p.double()
    kernels.orthogonalize(p, factors)
    kernels.orthogonalize.reference(expected, factors)
    assert (p - expected).abs().max() < 2e-4  # of the same signs, as ranks with other kernels must find them
    for basis in factors.left(p.double()):
        assert (basis @ basis.T - torch.eye(len(basis))).abs().max() < 2e-6


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_factor_that_is_not_finite_becomes_nan_alone(level, bad):
    factors = laid_out([(9, 8, 2)] * 3)
    p, q = numbers(54), numbers(48)
    p[20] = q[17] = bad  # in the second matrix; in the first of its vectors
    kernels.orthogonalize(p, factors)
    kernels.normalize(q, factors)
    assert p.isnan().tolist() == [False] * 18 + [True] * 18 + [False] * 18
    assert q.isnan().tolist() == [False] * 16 + [True] * 8 + [False] * 24


def test_unit_vectors_are_those_of_float64_and_zeros_become_the_previous(level, threads):
    factors = laid_out(SHAPES * 9)
    q, previous = numbers(factors.right_offsets[-1]), numbers(factors.right_offsets[-1], seed=1)
    q[53 * 3 + 8 : 53 * 4 + 8] = 0  # the last vector of the third matrix
    expected = q.double()
    kernels.normalize(q, factors, previous)
    kernels.normalize.reference(expected, factors, previous.double())
    assert torch.allclose(q.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(q[53 * 3 + 8 : 53 * 4 + 8], previous[53 * 3 + 8 : 53 * 4 + 8])
