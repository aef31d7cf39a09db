"""The device of a launch, and the number of programs that fill it."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from . import INTERPRETED


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the device of `tensor` the current one, where launches go; it mostly is."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the programs that a device runs side by side at least; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def options(warps: int, fused: bool = False) -> dict[str, int]:
    """Return the options of a launch: warps of a program, and fused products and sums, which round once, not twice."""
    return {"num_warps": warps, "enable_fp_fusion": fused}


def divided(total: int, part: int) -> int:
    """Return how many parts of a size cover `total`."""
    return -(-total // part)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


def tile(device: int, interpreted: int) -> int:
    """A size of tiles: `device` on a GPU, `interpreted` where the time is that of the number of programs."""
    return interpreted if INTERPRETED else device
