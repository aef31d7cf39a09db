"""Checks of what a kernel cannot see from an address: dtypes, layout, size and device of tensors.

The checks of an operation take its arguments and look at their structure alone: see `Contract`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import add

import torch
from torch import Tensor

from .operands import FORMATS, Factors, Residual, Rows

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WIDE = (torch.float32,)
STORED = (*FLOATS, torch.int8)  # of residuals between steps
INDICES = (torch.int32, torch.int64)


def require(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    """Raise `error` with `message` unless `condition` holds."""
    if not condition:
        raise error(message)


def on_one_device(**tensors: Tensor | None) -> None:
    """All are where the first is, else ValueError."""
    places = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    first, device = next(iter(places.items()))
    for name, place in places.items():
        require(place == device, f"{name} is on {place}, {first} on {device}; all tensors have to be on one device")


def flat(**tensors: Tensor | None) -> None:
    """All lie without gaps, else ValueError."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise ValueError(f"{name} is not contiguous (shape {shape}, strides {strides}); pass {name}.contiguous()")


def named(residual: Residual | None) -> dict[str, Tensor]:
    """The tensors of a residual by what messages call them; TypeError where it is none."""
    if residual is None:
        return {}
    require(
        isinstance(residual, Residual), f"a residual is a Residual, of two tensors, got {type(residual)}", TypeError
    )
    before, after = residual
    return {"residual": after} if before is after else {"residual.before": before, "residual.after": after}


def rows_of(dtype: torch.dtype, **tensors: Tensor) -> None:
    """All are of `dtype` (TypeError) and their last dimensions have no gaps (ValueError)."""
    for name, tensor in tensors.items():
        require(tensor.dtype == dtype, f"{name} is of {dtype}, got {tensor.dtype}", TypeError)
        require(
            tensor.stride(-1) == 1 or tensor.shape[-1] <= 1,
            f"the rows of {name} are not contiguous (strides {tensor.stride()})",
        )


def check_cast(source: Tensor, out: Tensor, scale: float, residual: Tensor | None = None) -> None:
    """The arguments of `cast_scaled`."""
    require(source.shape == out.shape, f"source and out differ in shape: {tuple(source.shape)}, {tuple(out.shape)}")
    on_one_device(source=source, out=out, residual=residual)
    flat(source=source, out=out, residual=residual)
    if residual is not None:
        narrow = f"the rounding error of {source.dtype} is not known: with a residual, source is of 32 bits or more"
        require(source.dtype.itemsize >= 4, narrow, TypeError)
        _as_long(out, Residual(residual, residual))


def check_gather(out: Tensor, places: Sequence[int], sizes: Sequence[int]) -> None:
    """The arguments of `gather_scaled`, whose sources have these numbers of elements."""
    flat(out=out)
    if len(sizes) != len(places):
        raise ValueError(f"there are {len(sizes)} sources and {len(places)} places")
    ends = sorted(zip(places, map(add, places, sizes), strict=True))
    apart = all(end <= start for (_, end), (start, _) in pairwise(ends))
    if sizes and not (apart and ends[0][0] >= 0 and ends[-1][1] <= out.numel()):
        spans = ", ".join(f"{place} to {place + size}" for place, size in zip(places, sizes, strict=True))
        raise ValueError(f"out has {out.numel()} elements, the sources are to lie at {spans}: inside, and apart")


def check_sign_pack(
    grad: Tensor, residual: Residual | None, scales: Tensor, bits: Tensor, length: int, signs: Tensor | None = None
) -> None:
    """The arguments of `sign_pack`."""
    _check_blocks(scales, length)
    rows_of(torch.uint8, bits=bits)
    expected = (scales.shape[0], length // 8)
    require(bits.shape == expected, f"bits have the shape {tuple(bits.shape)}, scales and length ask for {expected}")
    _check_encoding(grad, residual, scales, bits, length, "bits")
    _check_signs(signs, grad if residual is None else residual.after, length // scales.shape[1])


def check_quantize_blocks(
    grad: Tensor,
    residual: Residual | None,
    scales: Tensor,
    codes: Tensor,
    length: int,
    bits: int = 8,
    signs: Tensor | None = None,
) -> None:
    """The arguments of `quantize_blocks`."""
    _check_bits(bits)
    _check_blocks(scales, length)
    rows_of(torch.int8, codes=codes)
    expected = (scales.shape[0], length * bits // 8)
    require(codes.shape == expected, f"codes have the shape {tuple(codes.shape)}, scales and length ask for {expected}")
    _check_encoding(grad, residual, scales, codes, length, "codes")
    _check_signs(signs, grad if residual is None else residual.after, length // scales.shape[1])


def check_sign_unpack_mean(
    scales: Tensor, bits: Tensor, out: Tensor, residual: Tensor | None = None, signs: Tensor | None = None
) -> None:
    """The arguments of `sign_unpack_mean`."""
    rows_of(torch.uint8, bits=bits)
    _check_decoding(scales, bits, bits.shape[2] * 8, out, residual, "bits")
    _check_signs(signs, out, bits.shape[2] * 8 // scales.shape[2])


def check_dequantize_mean(
    scales: Tensor,
    codes: Tensor,
    out: Tensor,
    bits: int = 8,
    residual: Tensor | None = None,
    signs: Tensor | None = None,
) -> None:
    """The arguments of `dequantize_mean`."""
    _check_bits(bits)
    rows_of(torch.int8, codes=codes)
    length = codes.shape[2] * 8 // bits
    _check_decoding(scales, codes, length, out, residual, "codes")
    _check_signs(signs, out, length // scales.shape[2])


def check_select_largest(grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int) -> None:
    """The arguments of `select_largest`."""
    require(length > 0, f"a row has at least one element, got {length}")
    _check_sparse(indices, values)
    require(length - 1 <= torch.iinfo(indices.dtype).max, f"{indices.dtype} has no index of element {length - 1}")
    _holds(values.shape[0], length, grad)
    on_one_device(grad=grad, **named(residual), indices=indices, values=values)
    flat(grad=grad, **named(residual))
    _as_long(grad, residual)


def check_scatter_mean(indices: Tensor, values: Tensor, out: Tensor, length: int) -> None:
    """The arguments of `scatter_mean`."""
    require(length > 0, f"a row has at least one element, got {length}")
    _check_sparse(indices, values)
    on_one_device(indices=indices, values=values, out=out)
    flat(out=out)


def check_left(grad: Tensor, residual: Residual | None, factors: Factors, q: Tensor, p: Tensor) -> None:
    """The arguments of `low_rank_left`."""
    _as_long(grad, residual)
    _check_product(factors, p, q, grad=grad, **named(residual))


def check_right(matrices: Tensor, factors: Factors, p: Tensor, q: Tensor) -> None:
    """The arguments of `low_rank_right`."""
    _check_product(factors, p, q, matrices=matrices)


def check_finish(grad: Tensor, residual: Tensor | None, factors: Factors, p: Tensor, q: Tensor) -> None:
    """The arguments of `low_rank_finish`."""
    _as_long(grad, None if residual is None else Residual(residual, residual))
    _check_product(factors, p, q, grad=grad, residual=residual)


def check_orthogonalize(p: Tensor, factors: Factors) -> None:
    """The arguments of `orthogonalize`."""
    end_of(factors)
    for m in factors.matrices:
        require(m.rank <= m.rows, f"{m.rank} vectors of {m.rows} elements cannot be orthonormal: {m}")
    check_factor("p", p, factors.left_offsets[-1])


def check_normalize(q: Tensor, factors: Factors, previous: Tensor | None = None) -> None:
    """The arguments of `normalize`."""
    end_of(factors)
    on_one_device(q=q, previous=previous)
    check_factor("q", q, factors.right_offsets[-1])
    if previous is not None:
        check_factor("previous", previous, factors.right_offsets[-1])


def check_factor(name: str, factor: Tensor, size: int) -> None:
    """A flat buffer of factors holds `size` elements."""
    flat(**{name: factor})
    require(factor.numel() >= size, f"{name} has {factor.numel()} elements, the factors need {size}")


def end_of(factors: Factors) -> int:
    """One past the last element of the last matrix; ValueError for what is no matrix."""
    for m in factors.matrices:
        require(min(m.offset, m.rows, m.columns) >= 0 and m.rank > 0, f"not a matrix: {m}")
    return max((m.offset + m.rows * m.columns for m in factors.matrices), default=0)


def _end_apart(factors: Factors) -> int:
    """Return `end_of`; raise ValueError also for two matrices that share elements."""
    end = 0
    for m in sorted(factors.matrices, key=lambda each: each.offset):
        require(m.offset >= end or not m.rows * m.columns, f"the matrix before it ends at element {end}: {m}")
        end = max(end, m.offset + m.rows * m.columns)
    return end_of(factors)


def _check_product(factors: Factors, p: Tensor, q: Tensor, **tensors: Tensor | None) -> None:
    on_one_device(**tensors, p=p, q=q)
    flat(**tensors, p=p, q=q)
    end, numel = _end_apart(factors), next(each.numel() for each in tensors.values() if each is not None)
    require(end <= numel, f"the matrices end at element {end}, the gradient has {numel}")
    check_factor("p", p, factors.left_offsets[-1])
    check_factor("q", q, factors.right_offsets[-1])


def check_rotate_blocks(values: Tensor, signs: Tensor) -> None:
    """The arguments of `rotate_blocks`."""
    block = signs.numel()
    require(block > 0 and block & (block - 1) == 0, f"a block that is rotated is a power of two, got {block}")
    on_one_device(values=values, signs=signs)
    flat(values=values, signs=signs)
    require(signs.dtype == values.dtype, f"values are of {values.dtype}, signs of {signs.dtype}", TypeError)


def check_rows(values: Tensor, used: Tensor, rows: Rows) -> None:
    """The arguments of `mark_rows` and `clear_rows`."""
    on_one_device(values=values, used=used)
    flat(values=values, used=used)
    require(used.dtype == torch.bool, f"used is of {torch.bool}, got {used.dtype}", TypeError)
    for block in rows.blocks:
        end, last = block.start + block.rows * block.size, block.number + block.rows
        require(block.start >= 0 and end <= values.numel(), f"rows end at element {end} of {values.numel()}")
        require(block.number >= 0 and last <= used.numel(), f"there are {last} rows, and {used.numel()} marks")


def _check_bits(bits: int) -> None:
    require(bits in FORMATS, f"a code has 8, 4 or 2 bits, got {bits}")


def _check_blocks(scales: Tensor, length: int) -> None:
    blocks = scales.shape[-1]
    require(blocks > 0 and length % blocks == 0, f"{blocks} blocks do not divide a row of {length} elements")
    block = length // blocks
    require(block % 8 == 0 and block > 0, f"a block is a multiple of 8 elements, got {block}")
    rows_of(torch.float32, scales=scales)


def _check_encoding(
    grad: Tensor, residual: Residual | None, scales: Tensor, payload: Tensor, length: int, name: str
) -> None:
    _holds(scales.shape[0], length, grad)
    on_one_device(grad=grad, **named(residual), scales=scales, **{name: payload})
    flat(grad=grad, **named(residual))
    _as_long(grad, residual)


def _check_decoding(
    scales: Tensor, payload: Tensor, length: int, out: Tensor, residual: Tensor | None, name: str
) -> None:
    require(len(scales) > 0, "there are no voters")
    _check_blocks(scales, length)
    require(
        payload.shape[:2] == scales.shape[:2],
        f"{name} of {tuple(payload.shape[:2])} voters and rows, scales of {tuple(scales.shape[:2])}",
    )
    _holds(scales.shape[1], length, out)
    on_one_device(scales=scales, out=out, residual=residual, **{name: payload})
    flat(out=out, residual=residual)
    _as_long(out, None if residual is None else Residual(residual, residual))


def _check_signs(signs: Tensor | None, values: Tensor, block: int) -> None:
    """The signs of a rotation of blocks, of numbers in the dtype of `values` or a wider one."""
    if signs is None:
        return
    require(signs.numel() == block, f"a block has {block} elements, and there are {signs.numel()} signs of a rotation")
    require(block & (block - 1) == 0, f"a block that is rotated is a power of two, got {block}")
    on_one_device(values=values, signs=signs)
    flat(signs=signs)
    wide = torch.promote_types(values.dtype, torch.float32)
    require(
        signs.dtype == wide, f"the arithmetic is in {wide}, the signs of a rotation are of {signs.dtype}", TypeError
    )


def _check_sparse(indices: Tensor, values: Tensor) -> None:
    require(indices.dtype in INDICES, f"indices are int32 or int64, got {indices.dtype}", TypeError)
    require(indices.shape == values.shape, f"indices {tuple(indices.shape)} and values {tuple(values.shape)} differ")
    rows_of(indices.dtype, indices=indices)
    rows_of(values.dtype, values=values)


def _holds(rows: int, length: int, tensor: Tensor) -> None:
    require(rows * length >= tensor.numel(), f"{rows} rows of {length} do not hold {tensor.numel()} elements")


def _as_long(grad: Tensor, residual: Residual | None) -> None:
    if residual is not None:
        for each in residual:
            require(each.numel() == grad.numel(), "the residual is not as long as the gradient")
        before, after = (each.dtype for each in residual)
        require(before == after, f"residual.before is of {before}, residual.after of {after}", TypeError)
