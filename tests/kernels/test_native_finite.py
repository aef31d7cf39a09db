"""The native look for what is not finite, on every instruction set."""

import numpy
import pytest
import torch

from gradwire import kernels

from ..gpu.cases import GRADS, INF, NAN, numbers
from .native_given import SIZES, native_of, needs_native, unaligned

pytestmark = needs_native


@pytest.mark.parametrize("dtype", GRADS, ids=str)
@pytest.mark.parametrize("size", [0, *SIZES])
def test_a_bad_element_is_found_wherever_it_is(level, threads, size, dtype):
    tensor = unaligned(numbers(size, dtype).clamp_(-100, 100))
    assert kernels.all_finite(tensor)
    for bad in (INF, -INF, NAN) if size else ():
        for place in (0, size // 2, size - 1):
            spoiled = tensor.clone()
            spoiled[place] = bad
            assert not kernels.all_finite(spoiled)


def test_elements_are_counted_in_64_bits():
    tensor = torch.from_numpy(numpy.zeros((1 << 31) + 77, dtype=numpy.float16))  # of zeros the system keeps one page
    tensor[-1] = INF
    assert not native_of(kernels.all_finite)(tensor)
