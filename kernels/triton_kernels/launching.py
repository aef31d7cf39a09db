"""Launches: their device, the number of programs that fill it, and what was compiled for calls alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from . import INTERPRETED

HERE = nullcontext()


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the device of `tensor` the current one, where launches go; it mostly is."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(tensor.device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the programs that a device runs side by side at least; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def shared_kilobytes(device: torch.device) -> int:
    """Return KiB of shared memory of a multiprocessor, by NVIDIA's table of compute capabilities."""
    if device.type != "cuda" or torch.version.hip:
        return 228
    return {(8, 0): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228}.get(torch.cuda.get_device_capability(device), 100)


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


class Launched:
    """A kernel that finds again what Triton compiled for arguments alike: Triton's own search takes the host longer.

    Alike are calls with the same constants, types, places within 16 bytes, and divisibility of the numbers that Triton
    specializes for. Pointers come first among the parameters, constants last.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._constants = tuple(each.name for each in kernel.params if each.is_constexpr)
        self._numbers: tuple[int, ...] | None = None  # places of those that Triton specializes for
        self._pointers = 0
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, programs: tuple[int]) -> Callable[..., None]:
        """Return what launches so many programs."""
        return functools.partial(self._launch, programs)

    def _launch(self, programs: tuple[int], *arguments: Any, **constants: Any) -> None:
        numbers = self._look(arguments) if self._numbers is None else self._numbers
        key: list[Any] = [arguments[0].get_device(), *constants, *constants.values()]
        for tensor in arguments[: self._pointers]:
            key += (tensor.dtype, tensor.data_ptr() & 15)
        for place in numbers:
            number = arguments[place]
            key.append(2 if number & 15 == 0 else number == 1)
        if (found := self._compiled.get(known := tuple(key))) is not None:
            kernel, tail = found
            kernel[(programs[0], 1, 1)](*arguments, *tail)
        elif (kernel := self._kernel[programs](*arguments, **constants)) is not None:
            self._compiled[known] = kernel, tuple(constants[name] for name in self._constants)

    def _look(self, arguments: tuple[Any, ...]) -> tuple[int, ...]:
        """Note which arguments are pointers, and which numbers count: these are returned."""
        self._pointers = sum(isinstance(each, Tensor) for each in arguments)
        pairs = enumerate(zip(self._kernel.params, arguments, strict=False))
        found = (place for place, (each, value) in pairs if isinstance(value, int) and not each.do_not_specialize)
        self._numbers = tuple(found)
        return self._numbers


def launched(kernel: Any) -> Any:
    """Decorator: what launches a kernel of Triton; its interpreter launches by itself."""
    return kernel if INTERPRETED else Launched(kernel)
