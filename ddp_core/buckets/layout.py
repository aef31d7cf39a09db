"""The layout of gradients in a bucket's flat buffer, as DDP has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...compress import Layout, Ranks


def plain(name: str) -> str:
    """A parameter's name without what torch.compile puts into it.

    >>> plain("_orig_mod.encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """{name: plain name} of a model's parameters; those that would share a plain name keep their own.

    >>> plain_names(["weight", "_orig_mod.weight", "_orig_mod.bias"])
    {'weight': 'weight', '_orig_mod.weight': '_orig_mod.weight', '_orig_mod.bias': 'bias'}
    """
    names = list(names)
    shared = Counter(map(plain, names))
    return {name: name if shared[plain(name)] > 1 else plain(name) for name in names}


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients: its own, or what `parameter.grad_dtype` says, where torch has that."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype


def grad_bytes(parameter: Tensor) -> int:
    """The bytes of a parameter's gradient."""
    return parameter.numel() * grad_dtype(parameter).itemsize


def is_packed(parameter: Tensor) -> bool:
    """Return True if its elements lie one behind the other in some order of its axes, without gaps or overlaps."""
    return parameter.permute(memory_order(parameter)).is_contiguous()


def memory_order(parameter: Tensor) -> list[int]:
    """The axes of a parameter, that of the largest stride first."""
    return sorted(range(parameter.dim()), key=parameter.stride, reverse=True)


def laid_out(parameter: Tensor) -> Sequence[int]:
    """The axes of a parameter in the order in which a bucket lays them out; as contiguous where it has gaps or overlaps."""
    return memory_order(parameter) if is_packed(parameter) else range(parameter.dim())


def axis_order(parameter: Tensor) -> list[int]:
    """The axes with more than one element, in the order in which a bucket lays them out."""
    return [axis for axis in laid_out(parameter) if parameter.size(axis) > 1]


def memory_shape(parameter: Tensor) -> tuple[int, ...]:
    """The sizes of a parameter in memory order, as DDP lays its gradient out; complex numbers add an axis of 2.

    A channels-last (out, in, k, k) lies as (out, k, k, in).
    """
    shape = tuple(parameter.size(axis) for axis in laid_out(parameter))
    return (*shape, 2) if parameter.is_complex() else shape


def layout_of(named: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, ranks: Ranks) -> Layout:
    """The layout of a bucket with these parameters, in order."""
    shapes = tuple(memory_shape(parameter) for parameter in named.values())
    return Layout(tuple(named), shapes, dtype, device, ranks)


def as_real(buffer: Tensor) -> Tensor:
    """A bucket's buffer as flat real numbers, sharing memory.

    Raises TypeError for sparse gradients.
    """
    if buffer.is_sparse:
        raise TypeError(
            "sparse gradients cannot be compressed: use sparse=False or gradwire.DistributedDataParallel, or leave it out "
            "with _ddp_params_and_buffers_to_ignore"
        )
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
