"""The native payloads of 8, 4 and 2 bits, and rotations, on every instruction set, against the reference, to the bit."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Residual
from gradwire.kernels.quantization import FORMATS

from ..gpu.cases import GRADS, INF, NAN, check_quantized, numbers, quantized, same
from ..residuals import in_place
from .native_given import LARGE, needs_native, unaligned

pytestmark = needs_native
IMPLEMENTATIONS = kernels.quantize_blocks, kernels.quantize_blocks.reference


@pytest.mark.parametrize("seed", [-1, 1 << 40])
@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("block", [24, 128])
@pytest.mark.parametrize("size", [9, 140_003])  # the last is enough work for two threads
def test_payload_residual_and_mean_are_those_of_the_reference(level, threads, size, block, grad_dtype, bits, seed):
    check_quantized(size, -(-size // block // 2) * block or block, block, grad_dtype, bits, seed)


@pytest.mark.parametrize("bits", FORMATS)
def test_large_payloads_and_means_are_those_of_the_reference(level, threads, bits):
    grad, before, outputs = numbers(LARGE), numbers(LARGE, seed=1), []
    for quantize in IMPLEMENTATIONS:
        after = torch.full((LARGE,), NAN)
        scales, codes = quantized(quantize, grad, Residual(before, after), -(-LARGE // 128) * 128, 128, bits)
        outputs.append((scales, codes, after))
    assert all(same(found, expected) for found, expected in zip(*outputs, strict=True))
    for start in (0, 1, 3):
        out, expected = torch.full((LARGE + start,), NAN)[start:], torch.empty(LARGE)
        kernels.dequantize_mean(scales[None], codes[None], out, bits)
        kernels.dequantize_mean.reference(scales[None], codes[None], expected, bits)
        assert same(out, expected)


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("extreme", [INF, -INF, NAN, 3e38, 1e-45, 1e-40, 0.0])
def test_extreme_blocks_are_those_of_the_reference(level, extreme, bits):
    grad, outputs = numbers(256), []
    grad[128:] = torch.tensor([extreme, -extreme / 2] * 64)
    grad[130:] *= -0.25
    for quantize in IMPLEMENTATIONS:
        residual = torch.zeros(256)
        outputs.append((residual, *quantized(quantize, grad, in_place(residual), 256, 128, bits)))
    assert all(same(found, expected) for found, expected in zip(*outputs, strict=True))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("block", [1, 4, 8, 16, 32, 64, 128, 1024])
def test_rotations_are_those_of_the_reference(level, threads, block, back):
    signs = numbers(block, seed=1).sign()
    for size in (1, 9, 1009, 140_003):
        found, expected = unaligned(numbers(size)), numbers(size)
        kernels.rotate_blocks(found, signs, back)
        kernels.rotate_blocks.reference(expected, signs, back)
        assert same(found, expected)
