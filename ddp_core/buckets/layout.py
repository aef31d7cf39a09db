"""How DDP lays gradients out in a bucket's flat buffer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from ...compress import Layout


def plain(name: str) -> str:
    """A parameter's name without what torch.compile puts into it.

    >>> plain("_orig_mod.encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def is_packed(parameter: Tensor) -> bool:
    """Whether its elements lie one behind the other in some order of its axes, without gaps or overlaps."""
    order = memory_order(parameter)
    sizes = [parameter.size(axis) for axis in order]
    dense = list(accumulate(reversed(sizes), mul, initial=1))[-2::-1]
    strides = [parameter.stride(axis) for axis in order]
    return all(size == 1 or have == want for size, have, want in zip(sizes, strides, dense, strict=True))


def memory_order(parameter: Tensor) -> list[int]:
    """The axes of a parameter, that of the largest stride first."""
    return sorted(range(parameter.dim()), key=parameter.stride, reverse=True)


def axis_order(parameter: Tensor) -> list[int]:
    """The axes with more than one element, in the order in which a bucket lays them out."""
    axes = memory_order(parameter) if is_packed(parameter) else range(parameter.dim())
    return [axis for axis in axes if parameter.size(axis) > 1]


def memory_shape(parameter: Tensor) -> tuple[int, ...]:
    """The sizes of a parameter in memory order, as DDP lays its gradient out; complex numbers add an axis of 2.

    A channels-last (out, in, k, k) lies as (out, k, k, in). A parameter with gaps or overlaps is laid out as contiguous.
    """
    sizes = tuple(parameter.size(axis) for axis in memory_order(parameter))
    shape = sizes if is_packed(parameter) else tuple(parameter.shape)
    return (*shape, 2) if parameter.is_complex() else shape


def layout_of(
    named: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    world_size: int,
    rank: int,
    ranks_per_host: int = 1,
) -> Layout:
    """The layout of a bucket with these parameters, in order."""
    shapes = tuple(memory_shape(parameter) for parameter in named.values())
    return Layout(tuple(named), shapes, dtype, device, world_size, rank, ranks_per_host)


def as_real(buffer: Tensor) -> Tensor:
    """A bucket's buffer as flat real numbers, sharing memory.

    Raises TypeError for sparse gradients.
    """
    if buffer.is_sparse:
        raise TypeError(
            "sparse gradients cannot be compressed: build the embedding with sparse=False, or leave it out of DDP with "
            "_ddp_params_and_buffers_to_ignore"
        )
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
