"""Jobs of payloads of 8, 4, 2 and 1 bits, which have a scale a block, and of rotations of blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ... import kernels
from ...kernels import Residual
from ...kernels.quantization import FORMATS
from .heavy_tail import HeavyTail
from .job import Job, Output, inputs, whole_blocks

BLOCK = 128  # elements that share a scale: the default of the compressors int8, int4 and int2
SIGN_BLOCK = 1024  # elements that share a scale: the default of the compressor onebit
BYTE_OF_FLAGS = 0x0102040810204080  # times 8 bytes of 0 or 1: the highest byte of the product has them as bits


def quantize_blocks(elements: int, dtype: torch.dtype, device: torch.device, bits: int = 8) -> Job:
    """A bucket and its residual to whole numbers and block scales; what rounding loses stays in the residual.

    Scales and what both outputs say together count: a code at the middle between two may go either way.
    """
    length = whole_blocks(elements, BLOCK)
    grad, padded = inputs(elements, dtype, device)[0], torch.zeros(length, device=device)
    residual, scales = padded[:elements], torch.zeros(1, length // BLOCK, device=device)
    codes = torch.zeros(1, length * bits // 8, dtype=torch.int8, device=device)

    def run_baseline() -> None:
        residual.add_(grad)
        codes.copy_(torch_codes(padded.view(-1, BLOCK), scales, bits).view(1, -1))

    def results() -> list[Output]:
        sent = torch.zeros(elements, device=device)
        kernels.dequantize_mean.reference(scales[None], codes[None], sent, bits)
        return [Output("scales", scales), Output("sent and residual", sent + residual)]

    def prepare(numbers: HeavyTail) -> None:
        padded[elements:].zero_()  # which the baseline writes over
        codes.fill_(-128)  # which no code is

    return Job(
        "abs().amax, div, round, clamp, shifts where several share a byte, mul, sub_",
        [grad, residual],
        [scales],
        grad.nbytes + 2 * residual.nbytes + scales.nbytes + elements * bits / 8,
        run=lambda: kernels.quantize_blocks(grad, Residual(residual, residual), scales, codes, length, bits),
        run_baseline=run_baseline,
        results=results,
        prepare=prepare,
    )


def torch_codes(blocks: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The codes of blocks by torch, every operator a pass: scales are written, and blocks keep what rounding loses."""
    limit, steps, offset = FORMATS[bits]
    torch.div(blocks.abs().amax(1), steps, out=scales[0])
    column = scales.view(-1, 1)
    levels = blocks.div(column)
    levels = levels.sub_(offset) if offset else levels
    levels = levels.round_().clamp_(-limit - offset, limit - offset).to(torch.int8)
    blocks.sub_((levels + offset if offset else levels) * column)
    if bits == 8:
        return levels
    levels = levels.view(-1, 8 // bits).bitwise_and_((1 << bits) - 1)
    return levels.bitwise_left_shift_(_shifts(bits, blocks.device)).sum(1, dtype=torch.int8)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Return the first bits of the codes that share a byte."""
    return torch.arange(0, 8, bits, dtype=torch.int8, device=device)


def dequantize_mean(elements: int, dtype: torch.dtype, device: torch.device, voters: int, bits: int = 8) -> Job:
    """The mean of several ranks' blocks: every rank's codes in, the mean out. The baseline takes a pass for each rank."""
    length = whole_blocks(elements, BLOCK)
    scales = torch.zeros(voters, 1, length // BLOCK, device=device)
    numbers = torch.arange(voters * length * bits // 8, device=device) * 37 % 255 - 127
    codes = numbers.to(torch.int8).view(voters, 1, -1)
    padded = torch.zeros(length, dtype=dtype, device=device)
    out = padded[:elements]

    def run_baseline() -> None:
        total = torch.zeros(length // BLOCK, BLOCK, device=device)
        for scale, code in zip(scales, codes, strict=True):
            total.addcmul_(torch_levels(code, bits).view_as(total), scale.view(-1, 1))
        padded.copy_(total.view(-1).div_(voters))

    return Job(
        "shifts where several share a byte, addcmul_ of int8",
        [scales],
        [out],
        scales.nbytes + voters * elements * bits / 8 + out.nbytes,
        run=lambda: kernels.dequantize_mean(scales, codes, out, bits),
        run_baseline=run_baseline,
        results=lambda: [Output("out", out)],
    )


def torch_levels(codes: Tensor, bits: int) -> Tensor:
    """The numbers that codes stand for, in steps of their scales, by torch."""
    if bits == 8:
        return codes
    raised = codes.view(-1, 1).bitwise_left_shift(8 - bits - _shifts(bits, codes.device))
    levels, offset = raised.bitwise_right_shift_(8 - bits), FORMATS[bits].offset
    return levels + offset if offset else levels


def rotate_blocks(elements: int, dtype: torch.dtype, device: torch.device, block: int = BLOCK) -> Job:
    """A bucket times a Hadamard matrix a block, in place; whole blocks count, up to rounding."""
    padded = torch.zeros(whole_blocks(elements, block), dtype=dtype, device=device)
    values, whole = padded[:elements], elements // block * block
    signs = torch.ones(block, dtype=dtype, device=device)
    signs[::3] = -1
    matrix = torch.eye(block, dtype=dtype, device=device).view(-1)
    kernels.rotate_blocks.reference(matrix, torch.ones_like(signs))

    def run_baseline() -> None:
        blocks = padded.view(-1, block).mul_(signs)
        blocks.copy_(blocks @ matrix.view(block, block))

    return Job(
        "mul_ by the signs, a product with the matrix",
        [padded],
        [],
        2 * values.nbytes,
        run=lambda: kernels.rotate_blocks(values, signs),
        run_baseline=run_baseline,
        results=lambda: [Output("values", values[:whole])],
    )


def sign_pack(elements: int, dtype: torch.dtype, device: torch.device) -> Job:
    """A bucket and its residual to signs and block scales, as onebit encodes; what they miss stays in the residual.

    Bits exactly, but for those behind the end; scales and residual up to the rounding of sums. The baseline is the fastest
    of several ways with torch's operators.
    """
    length = whole_blocks(elements, SIGN_BLOCK)
    grad, padded = inputs(elements, dtype, device)[0], torch.zeros(length, device=device)
    residual, scales = padded[:elements], torch.zeros(1, length // SIGN_BLOCK, device=device)
    bits = torch.zeros(1, length // 8, dtype=torch.uint8, device=device)
    counts = torch.full_like(scales[0], SIGN_BLOCK)
    counts[-1] = SIGN_BLOCK - (length - elements)

    def run_baseline() -> None:
        residual.add_(grad)
        blocks = padded.view(-1, SIGN_BLOCK)
        torch.div(blocks.abs().sum(1), counts, out=scales[0])
        flags = (padded >= 0).view(torch.int64)
        bits[0].copy_(flags.mul(BYTE_OF_FLAGS).bitwise_right_shift_(56))
        blocks.sub_(torch.copysign(scales.view(-1, 1), blocks))

    whole = Output("bits", bits[0, : elements // 8], exact=True)
    return Job(
        "abs().sum, >= 0 packed by int64 multiplication, copysign, sub_",
        [grad, residual],
        [scales, bits],
        grad.nbytes + 2 * residual.nbytes + scales.nbytes + elements / 8,
        run=lambda: kernels.sign_pack(grad, Residual(residual, residual), scales, bits, length),
        run_baseline=run_baseline,
        results=lambda: [whole, Output("scales", scales), Output("residual", residual)],
        prepare=lambda numbers: padded[elements:].zero_(),  # which the baseline writes over
    )


def sign_unpack_mean(elements: int, dtype: torch.dtype, device: torch.device, voters: int) -> Job:
    """The mean of several ranks' signs and scales, as onebit decodes: every vote in, the mean out.

    The baseline has a table of the signs in each byte: the fastest of several ways with torch's operators.
    """
    length = whole_blocks(elements, SIGN_BLOCK)
    scales = torch.zeros(voters, 1, length // SIGN_BLOCK, device=device)
    bits = torch.zeros(voters, 1, length // 8, dtype=torch.uint8, device=device)
    padded = torch.zeros(length, dtype=dtype, device=device)
    out = padded[:elements]
    bit = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and(1)
    signs = bit.mul(2).sub(1).to(device, torch.float32)

    def run_baseline() -> None:
        total = torch.zeros(length // SIGN_BLOCK, SIGN_BLOCK, device=device)
        for scale, vote in zip(scales, bits, strict=True):
            total.addcmul_(embedding(vote[0].int(), signs).view_as(total), scale.view(-1, 1))
        padded.copy_(total.view(-1).div_(voters))

    return Job(
        "embedding of bytes, addcmul_",
        [scales, bits],
        [out],
        scales.nbytes + voters * elements / 8 + out.nbytes,
        run=lambda: kernels.sign_unpack_mean(scales, bits, out),
        run_baseline=run_baseline,
        results=lambda: [Output("out", out)],
    )
