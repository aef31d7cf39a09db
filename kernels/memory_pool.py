"""Memory on a CPU for the time that a bucket is on its way: large blocks, used again by the next buckets.

malloc gives each thread a heap of its own, which keeps what other threads free: up to several times what is in use. These
blocks belong to no thread. Their sum never exceeds the most bytes that were in use at once.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

SMALLEST = 1 << 20  # bytes; malloc serves what is smaller


class Pool:
    """Blocks that are lent to tensors, and come back when the last tensor of theirs goes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: SimpleQueue[mmap.mmap] = SimpleQueue()  # a garbage collection may put, whatever thread it meets
        self._free: list[mmap.mmap] = []
        self._lent = self._most = 0  # bytes in use: now, and at most so far

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of any numbers, in a block of its own."""
        nbytes = math.prod(shape) * dtype.itemsize
        block = self._take(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        lent = (ctypes.c_char * nbytes).from_buffer(block)
        weakref.finalize(lent, self._returned.put, block).atexit = False
        flat = torch.frombuffer(lent, dtype=dtype)
        return flat if len(shape) == 1 else flat.view(*shape)  # a view keeps the block, even if it is emptied

    def _take(self, nbytes: int) -> mmap.mmap:
        """The smallest free block of that size to twice that size, or a new one."""
        with self._lock:
            self._collect()
            fitting = [block for block in self._free if nbytes <= len(block) <= 2 * nbytes]
            found = min(fitting, key=len, default=None)
            self._lent += nbytes if found is None else len(found)
            self._most = max(self._most, self._lent)
            if found is not None:
                self._free.remove(found)
                return found
            while self._free and self._lent + self.free_bytes > self._most:
                del self._free[0]  # unmaps it
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _collect(self) -> None:
        while not self._returned.empty():
            block = self._returned.get_nowait()
            self._free.append(block)
            self._lent -= len(block)

    @property
    def free_bytes(self) -> int:
        """Bytes of blocks that wait for the next tensor."""
        return sum(map(len, self._free))

    def release(self) -> None:
        """Give all free blocks back to the system."""
        with self._lock:
            self._collect()
            self._free.clear()
            self._most = self._lent


pool = Pool()


def temporary(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of any numbers for a part of a step, as `torch.empty` does. On a CPU a large one is from the pool."""
    if device.type == "cpu" and math.prod(shape) * dtype.itemsize >= SMALLEST:
        return pool.tensor(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)
