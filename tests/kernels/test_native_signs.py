"""The native 1-bit payloads on every instruction set, against the reference."""

import pytest
import torch

from gradwire import kernels

from ..gpu.cases import GRADS, NAN, check_signs, numbers, same
from .native_given import LARGE, SIZES, needs_native

pytestmark = needs_native


@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("block", [24, 1024])
@pytest.mark.parametrize("size", SIZES)
def test_signs_are_those_of_the_reference_and_the_mean_is_to_the_bit(level, threads, size, block, grad_dtype):
    check_signs(size, -(-size // block // 2) * block or block, block, grad_dtype)


def test_large_means_are_as_those_of_the_reference(level, threads):
    bits = torch.randint(0, 256, (3, 2, LARGE // 16 + 13), dtype=torch.uint8)[:, :, : (LARGE // 16 + 12) // 8 * 8]
    scales = numbers(3 * 2 * bits.shape[2] // 8).view(3, 2, -1)
    for start in (0, 1, 3):
        out, expected = torch.full((LARGE + start,), NAN)[start:], torch.empty(LARGE)
        kernels.sign_unpack_mean(scales, bits, out)
        kernels.sign_unpack_mean.reference(scales, bits, expected)
        assert same(out, expected)


def test_rows_of_a_payload_that_holds_other_things_too_are_left_as_they_are(level):
    rows = torch.full((3, 4 + 8 + 4), 7, dtype=torch.uint8)
    kernels.sign_pack(numbers(150), None, rows[:, :4].view(torch.float32), rows[:, 4:12], 64)
    assert (rows[:, 12:] == 7).all()
