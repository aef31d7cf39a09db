"""The operations in Triton for GPUs: streaming passes near memory speed, without a wait of the host.

Triton is imported when an operation first runs. Launches go to the current stream, read nothing back and have sizes that
depend on shapes alone, so that a CUDA graph can capture them; tables of matrices are copied to the device on first use, so
run an operation once before a capture. Without float atomics: the results of a shape are always the same. Tensors of
dtypes that it does not know go to the next backend, which is logged once.

With `TRITON_INTERPRET=1` in the environment Triton's interpreter runs the kernels on CPU tensors, for tests: slowly, and
only on explicit request.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..argument_checks import FLOATS, STORED, WIDE
from ..bases import normalize, orthogonalize
from ..casting import cast_scaled, gather_scaled
from ..contract import Supports, Unless
from ..dispatch import Operation, register_backend
from ..finite import all_finite, with_gaps
from ..low_rank import low_rank_finish, low_rank_left, low_rank_right
from ..operands import Residual
from ..quantization import dequantize_mean, quantize_blocks
from ..rotation import rotate_blocks
from ..selection import scatter_mean, select_largest
from ..signs import sign_pack, sign_unpack_mean
from ..zero_rows import clear_rows, mark_rows

NAME = "triton"
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
LARGEST_BLOCK = 8192  # elements of a block that is quantized or rotated: those that a program holds
MODULES: dict[str, dict[Operation[Any, Any], Supports]] = {  # the dtypes that the kernels of each operation know
    "casting": {cast_scaled: {"source": FLOATS, "out": FLOATS, "residual": WIDE}},
    "finite": {all_finite: {"tensor": FLOATS}},
    "signs": {
        sign_pack: {"grad": FLOATS, "residual": WIDE, "signs": WIDE},
        sign_unpack_mean: {"out": FLOATS, "residual": WIDE, "signs": WIDE},
    },
    "quantization": {
        quantize_blocks: {"grad": FLOATS, "residual": WIDE, "signs": WIDE},
        dequantize_mean: {"out": FLOATS, "residual": WIDE, "signs": WIDE},
    },
    "zero_rows": {mark_rows: {"values": STORED}, clear_rows: {"values": STORED}},
    "rotation": {rotate_blocks: {"values": WIDE, "signs": WIDE}},
    "selection": {select_largest: {"grad": FLOATS, "residual": WIDE, "values": FLOATS}},
    "scatter": {scatter_mean: {"values": FLOATS, "out": WIDE}},
    "low_rank": {
        low_rank_left: {"grad": FLOATS, "residual": WIDE, "q": WIDE, "p": WIDE},
        low_rank_right: {"matrices": FLOATS, "p": WIDE, "q": WIDE},
        low_rank_finish: {"grad": FLOATS, "residual": WIDE, "p": WIDE, "q": WIDE},
    },
    "bases": {orthogonalize: {"p": WIDE}, normalize: {"q": WIDE, "previous": WIDE}},
}


def _probe() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not (INTERPRETED or torch.cuda.is_available()):
        return "there is no GPU; TRITON_INTERPRET=1 runs the kernels on the CPU, slowly"
    try:
        import_module("triton")
    except ImportError as error:
        return f"triton does not import: {error}"
    return ""


def _large_block(grad: Tensor, residual: Residual | None, scales: Tensor, codes: Tensor, length: int, *_: Any) -> str:
    blocks = scales.shape[-1]
    return f"blocks above {LARGEST_BLOCK} elements" if length > LARGEST_BLOCK * max(1, blocks) else ""


def _large_rotation(place: int) -> Unless:
    """Refuse large blocks that are rotated. `place`: of the signs among the arguments."""

    def large(*given: Any) -> str:
        signs = given[place] if place < len(given) else None
        return f"blocks above {LARGEST_BLOCK} elements" if signs is not None and signs.numel() > LARGEST_BLOCK else ""

    return large


UNLESS: dict[Operation[Any, Any], Unless] = {
    all_finite: with_gaps,
    quantize_blocks: _large_block,
    dequantize_mean: _large_rotation(5),
    rotate_blocks: _large_rotation(1),
    sign_pack: _large_rotation(5),
    sign_unpack_mean: _large_rotation(4),
}


def _implement(operation: Operation[Any, Any], module: str, supports: Supports) -> None:
    """Let the function of the operation's name in `module` implement it, imported on first use."""
    add = operation.implement(NAME, supports, UNLESS.get(operation))

    @functools.wraps(operation.reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        return add(getattr(import_module(f".{module}", __name__), operation.name))(*args, **kwargs)  # from now on

    add(run)


for _module, _operations in MODULES.items():
    for _operation, _supports in _operations.items():
        _implement(_operation, _module, _supports)
gather_scaled.implement(NAME)(gather_scaled.reference)  # two launches for all sources, of torch's own
register_backend(NAME, "cpu" if INTERPRETED else "cuda", _probe, automatic=not INTERPRETED)
