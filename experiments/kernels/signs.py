"""Jobs of 1-bit payloads: a bucket to signs, and the mean of several ranks' signs."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from ... import kernels
from ...kernels import Residual
from .job import Job, Output, inputs, whole_blocks

BLOCK = 1024  # elements that share a scale: the default of the compressor onebit
BYTE_OF_FLAGS = 0x0102040810204080  # times 8 bytes of 0 or 1: the highest byte of the product has them as bits


def sign_pack(elements: int, dtype: torch.dtype, device: torch.device) -> Job:
    """A bucket and its residual to signs and block scales, as onebit encodes; what they miss stays in the residual.

    Bits exactly, but for those behind the end; scales and residual up to the rounding of sums. The baseline is the fastest
    of several ways with torch's operators.
    """
    length = whole_blocks(elements, BLOCK)
    grad, padded = inputs(elements, dtype, device)[0], torch.zeros(length, device=device)
    residual, scales = padded[:elements], torch.zeros(1, length // BLOCK, device=device)
    bits = torch.zeros(1, length // 8, dtype=torch.uint8, device=device)
    counts = torch.full_like(scales[0], BLOCK)
    counts[-1] = BLOCK - (length - elements)

    def run_baseline() -> None:
        residual.add_(grad)
        blocks = padded.view(-1, BLOCK)
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
    length = whole_blocks(elements, BLOCK)
    scales = torch.zeros(voters, 1, length // BLOCK, device=device)
    bits = torch.zeros(voters, 1, length // 8, dtype=torch.uint8, device=device)
    padded = torch.zeros(length, dtype=dtype, device=device)
    out = padded[:elements]
    bit = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and(1)
    signs = bit.mul(2).sub(1).to(device, torch.float32)

    def run_baseline() -> None:
        total = torch.zeros(length // BLOCK, BLOCK, device=device)
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
