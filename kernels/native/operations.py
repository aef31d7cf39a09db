"""The operations in C++: the compiled extension, and what each operation passes on to it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..argument_checks import FLOATS, STORED, WIDE, check_gather
from ..bases import normalize, orthogonalize
from ..casting import cast_scaled, gather_scaled
from ..finite import all_finite, with_gaps
from ..low_rank import low_rank_finish, low_rank_left, low_rank_right
from ..operands import Factors, Places, Residual, Rows
from ..quantization import FORMATS, dequantize_mean, quantize_blocks, steps_of
from ..rotation import decoded_rotated, encoded_rotated, rotate_blocks
from ..selection import scatter_mean, select_largest
from ..signs import sign_pack, sign_unpack_mean
from ..zero_rows import clear_rows, mark_rows

LARGEST_RANK = 32
NAME = "native"
INTERFACE = 7  # bindings.cpp has it too: raise both where a call means something else than it did
NONE = (None, None)  # in place of a residual's tensors
IN_ORDER = (None, 1, 0)  # in place of a table of places, its length, and the stride


def probe() -> str:
    """Why there is no extension; empty where there is."""
    try:
        library()
    except ImportError as error:
        return f"the extension is not built ({error}); reinstall gradwire where there is a C++17 compiler"
    return ""


@functools.cache
def library() -> Any:
    """The extension module; ImportError where it was not built, or from another version's sources."""
    module = import_module("._kernels", __package__)
    if getattr(module, "interface", 1) != INTERFACE:
        raise ImportError("the present one is of another version of gradwire")
    return module


@cast_scaled.implement(NAME, {"source": FLOATS, "out": FLOATS, "residual": WIDE})
def _cast_scaled(source: Tensor, out: Tensor, scale: float, residual: Tensor | None = None) -> None:
    library().cast_scaled(source, out, source.numel(), scale, residual, torch.get_num_threads())


@gather_scaled.implement(NAME, {"out": FLOATS})
def _gather_scaled(out: Tensor, sources: Sequence[Tensor], places: Sequence[int], scale: float) -> None:
    if any(map(Tensor.is_neg, sources)):
        sources = [source.resolve_neg() for source in sources]
    others = library().gather_scaled(out, sources, places, scale, torch.get_num_threads())
    if others or len(sources) != len(places):
        check_gather(out, places, [source.numel() for source in sources])
        gather_scaled.reference(out, [sources[i] for i in others], [places[i] for i in others], scale)


@all_finite.implement(NAME, {"tensor": FLOATS}, unless=with_gaps)
def _all_finite(tensor: Tensor) -> Tensor:
    finite = library().all_finite(tensor, tensor.numel(), torch.get_num_threads())
    return torch.tensor(finite, device="cpu")


@mark_rows.implement(NAME, {"values": STORED})
def _mark_rows(values: Tensor, used: Tensor, rows: Rows) -> None:
    library().mark_rows(values, values.element_size(), used, *_blocks(rows))


@clear_rows.implement(NAME, {"values": STORED})
def _clear_rows(values: Tensor, used: Tensor, rows: Rows) -> None:
    library().clear_rows(values, values.element_size(), used, *_blocks(rows))


@functools.lru_cache(maxsize=1024)
def _blocks(rows: Rows) -> tuple[Tensor, int]:
    """Four int64 for each block, and how many blocks there are."""
    blocks = [(block.start, block.rows, block.size, block.number) for block in rows.blocks]
    return torch.tensor(blocks, dtype=torch.int64, device="cpu"), len(blocks)


def _beyond(*arguments: Any) -> str:
    """Return in words which matrices C++ does not support; empty if it supports all."""
    for factors in (each for each in arguments if isinstance(each, Factors)):
        if any(m.rank > LARGEST_RANK or not m.rows * m.columns for m in factors.matrices):
            return f"empty matrices and ranks above {LARGEST_RANK}"
    return ""


@functools.lru_cache(maxsize=1024)
def _packed(factors: Factors) -> tuple[Tensor, int]:
    """A row of int64 for each matrix, and how many there are."""
    offsets = zip(factors.matrices, factors.left_offsets, factors.right_offsets, strict=False)
    rows = [(m.offset, m.rows, m.columns, m.rank, left, right) for m, left, right in offsets]
    return torch.tensor(rows, dtype=torch.int64, device="cpu"), len(rows)


@low_rank_left.implement(NAME, {"grad": FLOATS, "residual": WIDE, "q": WIDE, "p": WIDE}, unless=_beyond)
def _low_rank_left(grad: Tensor, residual: Residual | None, factors: Factors, q: Tensor, p: Tensor) -> None:
    library().low_rank_left(*_packed(factors), grad, *(residual or NONE), p, q, torch.get_num_threads())


@low_rank_right.implement(NAME, {"matrices": FLOATS, "p": WIDE, "q": WIDE}, unless=_beyond)
def _low_rank_right(matrices: Tensor, factors: Factors, p: Tensor, q: Tensor) -> None:
    library().low_rank_right(*_packed(factors), matrices, *NONE, p, q, torch.get_num_threads())


@low_rank_finish.implement(NAME, {"grad": FLOATS, "residual": WIDE, "p": WIDE, "q": WIDE}, unless=_beyond)
def _low_rank_finish(grad: Tensor, residual: Tensor | None, factors: Factors, p: Tensor, q: Tensor) -> None:
    library().low_rank_finish(*_packed(factors), grad, residual, residual, p, q, torch.get_num_threads())


@orthogonalize.implement(NAME, {"p": WIDE}, unless=_beyond)
def _orthogonalize(p: Tensor, factors: Factors) -> None:
    library().orthogonalize(*_packed(factors), p, torch.get_num_threads())


@normalize.implement(NAME, {"q": WIDE, "previous": WIDE}, unless=_beyond)
def _normalize(q: Tensor, factors: Factors, previous: Tensor | None = None) -> None:
    library().normalize(*_packed(factors), q, previous, torch.get_num_threads())


@quantize_blocks.implement(NAME, {"grad": FLOATS, "residual": WIDE, "signs": WIDE})
def _quantize_blocks(
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
    if signs is not None:
        rest = scales, codes, length, bits, None, seed, counter, places
        return encoded_rotated(
            lambda values, held: _quantize_blocks(values, held, *rest), grad, residual, signs, places, _rotate_blocks
        )
    rows, blocks = scales.shape
    cut = grad.numel(), rows, blocks, length // blocks, *(IN_ORDER if places is None else places.cut)
    steps = steps_of(bits, unbiased=seed >= 0 and residual is None)
    levels = bits, steps, FORMATS[bits].limit, seed, counter
    library().quantize_blocks(grad, *(residual or NONE), scales, codes, *cut, *levels, torch.get_num_threads())


@dequantize_mean.implement(NAME, {"out": FLOATS, "residual": WIDE, "signs": WIDE})
def _dequantize_mean(
    scales: Tensor,
    codes: Tensor,
    out: Tensor,
    bits: int = 8,
    residual: Tensor | None = None,
    signs: Tensor | None = None,
    places: Places | None = None,
) -> None:
    if signs is not None:
        decode = functools.partial(_dequantize_mean, scales, codes, bits=bits, places=places)
        return decoded_rotated(decode, out, residual, signs, places, _rotate_blocks, _cast_scaled)
    voters, rows, blocks = scales.shape
    block = codes.shape[2] * 8 // bits // blocks
    cut = voters, out.numel(), rows, blocks, block, *(IN_ORDER if places is None else places.cut)
    library().dequantize_mean(scales, codes, out, residual, *cut, bits, torch.get_num_threads())


@rotate_blocks.implement(NAME, {"values": WIDE, "signs": WIDE})
def _rotate_blocks(values: Tensor, signs: Tensor, back: bool = False, places: Places | None = None) -> None:
    cut = (
        values.numel(),
        signs.numel(),
        *(IN_ORDER if places is None else places.cut),
        0 if places is None else places.blocks,
    )
    library().rotate_blocks(values, signs, *cut, back, torch.get_num_threads())


@select_largest.implement(NAME, {"grad": FLOATS, "residual": WIDE, "values": FLOATS})
def _select_largest(grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int) -> None:
    places = grad.numel(), length, *values.shape
    library().select_largest(grad, *(residual or NONE), indices, values, *places, torch.get_num_threads())


@scatter_mean.implement(NAME, {"values": FLOATS, "out": WIDE})
def _scatter_mean(indices: Tensor, values: Tensor, out: Tensor, length: int, ascending: bool = False) -> None:
    library().scatter_mean(indices, values, out, *values.shape, out.numel(), length, torch.get_num_threads())


@sign_pack.implement(NAME, {"grad": FLOATS, "residual": WIDE, "signs": WIDE})
def _sign_pack(
    grad: Tensor,
    residual: Residual | None,
    scales: Tensor,
    bits: Tensor,
    length: int,
    signs: Tensor | None = None,
    places: Places | None = None,
) -> None:
    if signs is not None:
        rest = scales, bits, length, None, places
        return encoded_rotated(
            lambda values, held: _sign_pack(values, held, *rest), grad, residual, signs, places, _rotate_blocks
        )
    rows, blocks = scales.shape
    cut = grad.numel(), rows, blocks, length // blocks, *(IN_ORDER if places is None else places.cut)
    library().sign_pack(grad, *(residual or NONE), scales, bits, *cut, torch.get_num_threads())


@sign_unpack_mean.implement(NAME, {"out": FLOATS, "residual": WIDE, "signs": WIDE})
def _sign_unpack_mean(
    scales: Tensor,
    bits: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    signs: Tensor | None = None,
    places: Places | None = None,
) -> None:
    if signs is not None:
        decode = functools.partial(_sign_unpack_mean, scales, bits, places=places)
        return decoded_rotated(decode, out, residual, signs, places, _rotate_blocks, _cast_scaled)
    voters, rows, blocks = scales.shape
    block = bits.shape[2] * 8 // blocks
    cut = voters, out.numel(), rows, blocks, block, *(IN_ORDER if places is None else places.cut)
    library().sign_unpack_mean(scales, bits, out, residual, *cut, torch.get_num_threads())
