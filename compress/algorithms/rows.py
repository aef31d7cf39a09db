"""The length of rows of bytes in a payload."""

from __future__ import annotations

ALIGNMENT = 16  # bytes: what NCCL's fast protocols ask for
LONG_ALIGNMENT = 128  # of rows that it makes at most a thirty-second longer: a transaction of a GPU's memory
LONG = 32 * LONG_ALIGNMENT


def padded(size: int) -> int:
    """Bytes of a row of `size`, so that the next one begins where NCCL and GPUs are fast."""
    unit = LONG_ALIGNMENT if size >= LONG else ALIGNMENT
    return -(-size // unit) * unit
