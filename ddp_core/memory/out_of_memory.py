"""The error where a device has too little memory for a compressor's state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch

from ...compress.protocol.compressor import Compressor
from ...compress.protocol.layout import Layout
from ...compress.state.tree import Leaves

ON_CPUS = "can't allocate memory"  # in the RuntimeError that torch raises there
META = torch.device("meta")

State = TypeVar("State")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that a device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ON_CPUS in str(error)
    )


def kept_bytes(compressor: Compressor, layout: Layout) -> int:
    """Return the bytes that a bucket keeps between steps. What ranks share has a second copy, residuals have none."""
    leaves = Leaves(compressor.init(dataclasses.replace(layout, device=META)))
    leaves.version_what_ranks_share()
    return leaves.nbytes + sum(leaf.flat.nbytes for leaf in leaves.flat if leaf.versioned)


def allocated(allocate: Callable[[], State], told: Callable[[], tuple[str, int]], layout: Layout) -> State:
    """Return the state that `allocate` makes. Raises torch.OutOfMemoryError with what it takes, and what helps.

    `told`: whose state it is, and its bytes; asked only where there is no memory for it.
    """
    try:
        return allocate()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        whose, kept = told()
        raise torch.OutOfMemoryError(
            f"there is no memory on {layout.device} for the state of {whose}: {kept / 1e6:,.0f} MB for "
            f"{layout.numel:,} parameters, {kept / max(1, layout.numel):.1f} bytes per parameter on each rank. "
            "int4:residual_bits=8 keeps 1.0 to 1.5 bytes per parameter in large matrices, int8 and bf16 none; undo=False "
            "avoids a second copy"
        ) from error
