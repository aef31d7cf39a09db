"""Numbers and comparisons for the tests of the native backend."""

import numpy
import pytest
import torch

from gradwire import kernels
from gradwire.kernels import native

BACKEND = {backend.name: backend for backend in kernels.backends()}[native.NAME]
needs_native = pytest.mark.skipif(not BACKEND.available, reason=BACKEND.reason or "it is there")
INF, NAN = torch.inf, torch.nan
SIZES = [1, 9, 1009, 200_003]  # the last is enough work for three threads
LARGE = 2_200_003  # a result of so many float32 is written around the caches
GRADS = [torch.float32, torch.bfloat16, torch.float16]


def native_of(operation):
    """An operation's implementation in this backend, whatever was chosen."""

    def run(*arguments, **named):
        with kernels.use_backend(native.NAME):
            return operation(*arguments, **named)

    return run


def numbers(size, dtype=torch.float32, seed=0):
    """Numbers with a heavy tail, as gradients have."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, size, generator=generator)
    return (first * second.square()).to(dtype)


def unaligned(tensor):
    """The same numbers, one element past the start of an allocation."""
    return torch.cat([tensor.new_zeros(1), tensor])[1:]


def same(first, second):
    """Equal to the bit, but for the bits of NaN and the sign of zero."""
    return numpy.array_equal(first.double().numpy(), second.double().numpy(), equal_nan=True)
