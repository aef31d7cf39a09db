"""Payloads of 8, 4 or 2 bits: a whole number for each element, of 2 bits and a half, and one float32 scale a block.

Rows and blocks are those of 1-bit payloads (`signs`): rows of `length` elements, blocks that divide it, a multiple of 8
each; what lies past the end of the vector is encoded as zeros and ignored when decoded. Whole numbers are two's
complements; of those that share a byte the first lies in its lowest bits. native/codes_loops.hpp and
triton_kernels/quantization.py have the same layout.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .argument_checks import check_dequantize_mean, check_quantize_blocks
from .casting import cast_scaled
from .dispatch import operation
from .operands import FORMATS, Places, Residual, in_blocks, out_of_blocks
from .rotation import decoded_rotated, encoded_rotated

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
    signs: Tensor | None = None,
    seed: int = -1,
    counter: int = 0,
    places: Places | None = None,
) -> None:
    """Encode `grad` (+ `residual`) as multiples of block scales; `residual.after` keeps the rest.

    A block's scale is a 127th of its largest magnitude (Dettmers 2016, symmetric), with 4 `bits` an 8th, with 2 a half; to
    nearest, ties to even, and -127 to 127, -7 to 7, or one of -1.5, -0.5, 0.5 and 1.5. With a `seed` from 0 on up or
    down at random; without `residual` the largest magnitude is then the largest code, so that the mean of many is exact
    (Alistarh et al. 2017; Wen et al. 2017); with one, so much noise would add up. Element i takes word i % 4 of
    Philox4x32-10 (Salmon et al. 2011) with the key `seed` at `counter` + i // 4. `grad`: flat, any float dtype; `residual`:
    flat, float32 or float64; `scales`: float32 (rows, blocks); `codes`: int8 (rows, length * bits / 8). With a non-finite
    element, the scale of its block is not finite and its codes are those nearest to zero. `signs`: of a rotation, as for
    `sign_pack`. `places`: of the blocks in `grad`; by default they lie one behind the other. Random words are those of
    elements of the payload, so i counts from the first element of the first row.
    """
    if signs is not None:
        rest = scales, codes, length, bits, None, seed, counter, places
        return encoded_rotated(
            lambda values, held: quantize_blocks.reference(values, held, *rest), grad, residual, signs, places
        )
    values = grad if residual is None else residual.plus(grad)
    rows, blocks = scales.shape
    wide = values.to(torch.promote_types(values.dtype, scales.dtype))
    padded = in_blocks(wide, rows * blocks, length // blocks, places).view(rows, blocks, -1)
    largest = padded.abs().amax(2, keepdim=True)
    limit, _, offset = FORMATS[bits]
    steps = steps_of(bits, unbiased=seed >= 0 and residual is None)
    scales.copy_((largest / steps).squeeze(2))
    levels = torch.where(largest.isfinite(), padded / torch.where(largest == 0, 1, largest) * steps, 0) - offset
    levels = (
        levels.round()
        if seed < 0
        else (levels + uniform(seed, counter, levels.numel(), grad.device).view_as(levels)).floor()
    )
    whole = levels.clamp(-limit - offset, limit - offset).to(torch.int8)
    if places is None:  # no code of 2 bits is zero
        whole.view(-1)[values.numel() :] = 0
    else:
        whole.masked_fill_(~places.elements(length // blocks)[1].view_as(whole), 0)
    codes.copy_(pack(whole.view(rows, length), bits))
    if residual is not None:
        said = _decoded(scales, codes, bits).view(rows * blocks, -1)
        values.sub_(out_of_blocks(said, values.numel(), places))


@operation(check=check_dequantize_mean, apart=[("scales", "out", "residual"), ("codes", "out", "residual")])
def dequantize_mean(
    scales: Tensor,
    codes: Tensor,
    out: Tensor,
    bits: int = 8,
    residual: Tensor | None = None,
    signs: Tensor | None = None,
    places: Places | None = None,
) -> None:
    """The mean over voters of `scale * code`, into the flat `out`; what its dtype rounds away is added to `residual`.

    `scales`: float32 (voters, rows, blocks); `codes`: int8 (voters, rows, length * bits / 8); summed in voter order, in
    float64 where `out` is that. `residual`: flat, float32 or wider. `signs`: of a rotation, which is undone. `places`:
    of the blocks in `out`; what lies between them is undefined afterwards.
    """
    if signs is not None:
        decode = functools.partial(dequantize_mean.reference, scales, codes, bits=bits, places=places)
        return decoded_rotated(decode, out, residual, signs, places)
    total = _decoded(scales[0], codes[0], bits).to(torch.promote_types(out.dtype, scales.dtype))
    for voter in range(1, len(scales)):
        total.add_(_decoded(scales[voter], codes[voter], bits))
    mean = out_of_blocks(total.div_(len(scales)).view(scales[0].numel(), -1), out.numel(), places)
    cast_scaled.reference(mean, out, 1.0, residual)


@functools.cache
def steps_of(bits: int, *, unbiased: bool) -> float:
    """Return the largest magnitude of a block in scales: the largest code where rounding has to be unbiased."""
    limit, steps, _ = FORMATS[bits]
    return float(limit) if unbiased else steps


def pack(levels: Tensor, bits: int) -> Tensor:
    """int8 numbers (rows, length), in bytes: those that share one in one."""
    if bits == 8:
        return levels
    fields = levels.view(len(levels), -1, 8 // bits).bitwise_and((1 << bits) - 1)
    return fields.bitwise_left_shift(_shifts(bits, levels.device)).sum(2, dtype=torch.int8)


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """Return the int8 numbers (rows, length) of bytes that they share."""
    if bits == 8:
        return codes
    raised = codes.unsqueeze(2).bitwise_left_shift(8 - bits - _shifts(bits, codes.device))
    return raised.bitwise_right_shift(8 - bits).flatten(1)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.int8, device=device)


def _decoded(scales: Tensor, codes: Tensor, bits: int) -> Tensor:
    """`scale * code` of every element, float32 (rows, length)."""
    rows, blocks = scales.shape
    levels = unpacked(codes, bits) + FORMATS[bits].offset
    return (levels.reshape(rows, blocks, -1) * scales.unsqueeze(2)).view(rows, -1)


def uniform(seed: int, counter: int, count: int, device: torch.device) -> Tensor:
    """`count` float32 numbers from [0, 1), multiples of 2^-24, the same for a seed and a counter on every device."""
    counters = counter % 2**63 + torch.arange(-(-count // 4), device=device)  # a dry run's steps may be beyond
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
