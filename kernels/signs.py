"""1-bit payloads: one sign bit an element and one float32 scale a block.

A flat vector is cut into rows of `length` elements (a multiple of 8), each row into blocks of `block` elements that
divide it. Bit i of byte j stands for element 8 j + i; 1 means not negative. What lies past the end of the vector is
encoded as zeros and ignored when decoded.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .argument_checks import check_sign_pack, check_sign_unpack_mean
from .casting import cast_scaled
from .dispatch import operation
from .operands import Places, Residual, in_blocks, out_of_blocks
from .rotation import decoded_rotated, encoded_rotated


@operation(check=check_sign_pack, apart=[("grad", "residual", "scales"), ("grad", "residual", "bits")])
def sign_pack(
    grad: Tensor,
    residual: Residual | None,
    scales: Tensor,
    bits: Tensor,
    length: int,
    signs: Tensor | None = None,
    places: Places | None = None,
) -> None:
    """Encode `grad` (+ `residual`) as signs and block scales; `residual.after` keeps the rest.

    A block's scale is the mean magnitude of its elements, the best in least squares (Seide et al. 2014; Karimireddy et
    al. 2019). `grad`: flat, any float dtype; `residual`: flat, float32 or float64; `scales`: float32 (rows, blocks);
    `bits`: uint8 (rows, length / 8). With a non-finite element, the scale of its block is not finite. `signs`: of a
    rotation, as many as a block has elements, in the dtype of the arithmetic. Then the signs are those of rotated blocks
    (see `rotate_blocks`), the residual is rotated back, and `grad` may be overwritten. `places`: of the blocks in `grad`; by
    default they lie one behind the other.
    """
    if signs is not None:
        return encoded_rotated(
            lambda values, held: sign_pack.reference(values, held, scales, bits, length, None, places),
            grad,
            residual,
            signs,
            places,
        )
    values = grad if residual is None else residual.plus(grad)
    rows, blocks = scales.shape
    block = length // blocks
    padded = in_blocks(values, rows * blocks, block, places)
    counts = (
        _real_elements(values.numel(), rows * blocks, block, values.device) if places is None else places.spans()[1]
    )
    wide = torch.promote_types(values.dtype, scales.dtype)
    means = padded.view(-1, block).abs().sum(1, dtype=wide) / counts.clamp(min=1)
    scales.copy_(means.view(rows, blocks))
    positive = padded.view(rows, length // 8, 8) >= 0
    bits.copy_((positive << _bit_positions(values.device)).sum(2, dtype=torch.uint8))
    if residual is not None:
        sent = _signed(scales, bits)
        values.sub_(out_of_blocks(sent.view(rows * blocks, block), values.numel(), places))


@operation(check=check_sign_unpack_mean, apart=[("scales", "out", "residual"), ("bits", "out", "residual")])
def sign_unpack_mean(
    scales: Tensor,
    bits: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    signs: Tensor | None = None,
    places: Places | None = None,
) -> None:
    """The mean over voters of `scale * sign`, into the flat `out`; what its dtype rounds away is added to `residual`.

    `scales`: float32 (voters, rows, blocks); `bits`: uint8 (voters, rows, length / 8); summed in voter order, in float64
    where `out` is that. `residual`: flat, float32 or wider. `signs`: of a rotation, which is undone. `places`: of the
    blocks in `out`; what lies between them is undefined afterwards.
    """
    if signs is not None:
        decode = functools.partial(sign_unpack_mean.reference, scales, bits, places=places)
        return decoded_rotated(decode, out, residual, signs, places)
    total = _signed(scales[0], bits[0]).to(torch.promote_types(out.dtype, scales.dtype))
    for voter in range(1, len(scales)):
        total.add_(_signed(scales[voter], bits[voter]))
    mean = out_of_blocks(total.div_(len(scales)).view(scales[0].numel(), -1), out.numel(), places)
    cast_scaled.reference(mean, out, 1.0, residual)


def _signed(scales: Tensor, bits: Tensor) -> Tensor:
    """`scale * sign` of every element, float32 (rows, length)."""
    rows, blocks = scales.shape
    positive = bits.unsqueeze(-1).bitwise_right_shift(_bit_positions(bits.device)).bitwise_and_(1)
    signs = positive.view(rows, blocks, -1).to(scales.dtype).mul_(2).sub_(1)
    return signs.mul_(scales.unsqueeze(-1)).view(rows, -1)


def _bit_positions(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _real_elements(numel: int, blocks: int, block: int, device: torch.device) -> Tensor:
    """Return how many elements of each block lie inside a vector of `numel`."""
    return (numel - torch.arange(blocks, device=device) * block).clamp(0, block)
