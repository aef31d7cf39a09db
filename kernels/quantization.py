"""Payloads of 8, 4 or 2 bits: one whole number an element and one float32 scale a block.

Rows and blocks are those of 1-bit payloads (`signs`): rows of `length` elements, blocks that divide it, a multiple of 8
each; what lies past the end of the vector is encoded as zeros and ignored when decoded. Numbers are two's complements; of
those that share a byte the first lies in its lowest bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .checks import check_dequantize_mean, check_quantize_blocks
from .dispatch import operation
from .residual import Residual

LARGEST_CODES = {8: 127, 4: 7, 2: 1}  # by bits
STEPS = {8: 127.0, 4: 8.0, 2: 2.25}  # of a scale up to the largest magnitude: what loses least where tails are heavy
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57  # of Philox4x32
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF


@operation(check=check_quantize_blocks, apart=[("grad", "residual", "scales"), ("grad", "residual", "codes")])
def quantize_blocks(
    grad: Tensor,
    residual: Residual | None,
    scales: Tensor,
    codes: Tensor,
    length: int,
    bits: int = 8,
    seed: int = -1,
    counter: int = 0,
) -> None:
    """Encode `grad` (+ `residual`) as whole multiples of block scales; `residual.after` keeps the rest.

    A block's scale is a 127th of its largest magnitude (Dettmers 2016, symmetric), with 4 `bits` an 8th, with 2 a part of
    2.25; to nearest, ties to even, and -127 to 127, -7 to 7, -1 to 1. With a `seed` from 0 on up or down at random; without
    `residual` the scale is then a 127th, a 7th, the whole, so that the mean of many is exact (Alistarh et al. 2017; Wen et
    al. 2017); with one, so much noise would add up. Element i takes word i % 4 of Philox4x32-10 (Salmon et al. 2011) with
    the key `seed` at `counter` + i // 4. `grad`: flat, any float dtype; `residual`: flat, float32 or float64; `scales`:
    float32 (rows, blocks); `codes`: int8 (rows, length * bits / 8). With a non-finite element, the scale of its block is
    not finite and its codes are zero.
    """
    values = grad if residual is None else residual.plus(grad)
    rows, blocks = scales.shape
    wide = values.to(torch.promote_types(values.dtype, scales.dtype))
    padded = pad(wide, (0, rows * length - values.numel())).view(rows, blocks, -1)
    largest = padded.abs().amax(2, keepdim=True)
    limit, steps = LARGEST_CODES[bits], steps_of(bits, seed, residual)
    scales.copy_((largest / steps).squeeze(2))
    levels = padded / torch.where(largest == 0, 1, largest) * steps
    if seed < 0:
        levels = levels.round()
    else:
        levels = (levels + uniform(seed, counter, levels.numel(), grad.device).view_as(levels)).floor()
    levels = torch.where(largest.isfinite(), levels.clamp(-limit, limit), 0)
    codes.copy_(_packed(levels.view(rows, length).to(torch.int8), bits))
    if residual is not None:
        values.sub_(_decoded(scales, codes, bits).view(-1)[: values.numel()])


@operation(check=check_dequantize_mean, apart=[("scales", "out"), ("codes", "out")])
def dequantize_mean(scales: Tensor, codes: Tensor, out: Tensor, bits: int = 8) -> None:
    """The mean over voters of `scale * code`, into the flat `out`.

    `scales`: float32 (voters, rows, blocks); `codes`: int8 (voters, rows, length * bits / 8); summed in voter order.
    """
    total = _decoded(scales[0], codes[0], bits)
    for voter in range(1, len(scales)):
        total.add_(_decoded(scales[voter], codes[voter], bits))
    out.copy_(total.div_(len(scales)).view(-1)[: out.numel()])


def steps_of(bits: int, seed: int, residual: Residual | None) -> float:
    """How many scales the largest magnitude of a block is: as many as the largest code where rounding has to be unbiased."""
    return float(LARGEST_CODES[bits]) if seed >= 0 and residual is None else STEPS[bits]


def _packed(levels: Tensor, bits: int) -> Tensor:
    """int8 numbers (rows, length), those that share a byte in one."""
    if bits == 8:
        return levels
    fields = levels.view(len(levels), -1, 8 // bits).bitwise_and((1 << bits) - 1)
    return fields.bitwise_left_shift(_shifts(bits, levels.device)).sum(2, dtype=torch.int8)


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    """int8 numbers (rows, length) of bytes that they share."""
    if bits == 8:
        return codes
    raised = codes.unsqueeze(2).bitwise_left_shift(8 - bits - _shifts(bits, codes.device))
    return raised.bitwise_right_shift(8 - bits).flatten(1)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.int8, device=device)


def _decoded(scales: Tensor, codes: Tensor, bits: int) -> Tensor:
    """`scale * code` of every element, float32 (rows, length)."""
    rows, blocks = scales.shape
    return (_unpacked(codes, bits).reshape(rows, blocks, -1) * scales.unsqueeze(2)).view(rows, -1)


def uniform(seed: int, counter: int, count: int, device: torch.device) -> Tensor:
    """`count` float32 numbers from [0, 1), multiples of 2^-24, the same for a seed and a counter on every device."""
    counters = counter + torch.arange(-(-count // 4), device=device)
    zero = torch.zeros_like(counters)
    words = torch.stack(philox(seed, (counters & WORD, (counters >> 32) & WORD, zero, zero)), 1)
    return ((words >> 8).float() * 2**-24).view(-1)[:count]


def philox(seed: int, counters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four words of 32 random bits (in int64) for four words of a counter and a key of 64 bits."""
    first, second, third, fourth = counters
    key = [seed & WORD, (seed >> 32) & WORD]
    for _ in range(10):
        left, right = first * MULTIPLIERS[0], third * MULTIPLIERS[1]  # modulo 2^64, which keeps all bits of them
        first, third = (right >> 32 & WORD) ^ second ^ key[0], (left >> 32 & WORD) ^ fourth ^ key[1]
        second, fourth = right & WORD, left & WORD
        key = [(word + step) & WORD for word, step in zip(key, KEY_STEPS, strict=True)]
    return first, second, third, fourth
