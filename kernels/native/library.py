"""The compiled extension, and how a tensor is handed to it."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..residual import Residual

NAME = "native"
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 0, torch.int64: 1}  # as C++ numbers them
NOTHING = (0, 0, 0, 0)


def probe() -> str:
    """Why there is no extension; empty where there is."""
    try:
        library()
    except ImportError as error:
        return f"the extension is not built ({error}); reinstall gradwire where there is a C++17 compiler"
    return ""


@functools.cache
def library() -> Any:
    """The extension module; ImportError where it was not built."""
    return import_module("._native", __package__)


def arrays(residual: Residual | None) -> tuple[tuple[int, int, int, int], ...]:
    """Both tensors of a residual as C++ is told of them."""
    return (NOTHING, NOTHING) if residual is None else (array(residual.before), array(residual.after))


def array(tensor: Tensor | None) -> tuple[int, int, int, int]:
    """What C++ is told: the address, the number of the format, the strides of the first two dimensions, but for the last."""
    if tensor is None:
        return NOTHING
    outer, inner = (*tensor.stride()[:-1], 0, 0)[:2]
    return tensor.data_ptr(), FORMATS.get(tensor.dtype, 0), outer, inner
