"""What C++ cannot see from an address: layout, dtype, size and overlap of tensors."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor


def require(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    """Raise `error` with `message` unless `condition` holds."""
    if not condition:
        raise error(message)


def address(tensor: Tensor | None) -> int:
    """Where the elements begin; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def flat(**tensors: Tensor | None) -> None:
    """All lie on the CPU without gaps, else ValueError."""
    for name, tensor in tensors.items():
        if tensor is not None:
            _on_cpu(name, tensor)
            require(
                tensor.is_contiguous(),
                f"{name} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}); "
                f"pass {name}.contiguous()",
            )


def rows_of(dtype: torch.dtype, **tensors: Tensor) -> None:
    """All are of `dtype` (TypeError) and their last dimensions have no gaps (ValueError)."""
    for name, tensor in tensors.items():
        _on_cpu(name, tensor)
        require(tensor.dtype == dtype, f"{name} is of {dtype}, got {tensor.dtype}", TypeError)
        require(
            tensor.stride(-1) == 1 or tensor.shape[-1] <= 1,
            f"the rows of {name} are not contiguous (strides {tensor.stride()})",
        )


def separate(**tensors: Tensor | None) -> None:
    """No two share memory, else ValueError."""
    spans = [(name, *_span(tensor)) for name, tensor in tensors.items() if tensor is not None and tensor.numel()]
    for (first, start, end), (second, other_start, other_end) in combinations(spans, 2):
        require(end <= other_start or other_end <= start, f"{first} and {second} overlap in memory")


def _on_cpu(name: str, tensor: Tensor) -> None:
    require(tensor.device.type == "cpu", f"{name} is on {tensor.device}, all tensors have to be on the CPU")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte and the one past the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
