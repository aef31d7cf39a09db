"""Rows of parameters in a flat buffer: which have an element other than zero, and zeros for the others."""

from __future__ import annotations

from torch import Tensor

from .argument_checks import check_rows
from .dispatch import operation
from .operands import Rows


@operation(check=check_rows, apart=[("values", "used")])
def mark_rows(values: Tensor, used: Tensor, rows: Rows) -> None:
    """Set `used[row]` for each row with an element other than zero, NaN included; the others stay as they are.

    `values`: flat, any float dtype, or int8; `used`: bool, one for each row.
    """
    for block in rows.blocks:
        block.of_rows(used).logical_or_(block.of(values).ne(0).any(1))


@operation(check=check_rows, apart=[("values", "used")])
def clear_rows(values: Tensor, used: Tensor, rows: Rows) -> None:
    """Put zeros into the rows of `values` that are not `used`. As for `mark_rows`."""
    for block in rows.blocks:
        block.of(values).masked_fill_(block.of_rows(used).logical_not().unsqueeze(1), 0)
