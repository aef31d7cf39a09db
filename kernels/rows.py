"""The places of rows of parameters in a flat buffer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Rows of one size: the first element in a flat buffer, how many rows, elements of each, number of the first row."""

    start: int
    rows: int
    size: int
    number: int

    def of(self, flat: Tensor) -> Tensor:
        """The rows in a flat buffer, as a matrix."""
        return flat[self.start : self.start + self.rows * self.size].view(self.rows, self.size)

    def of_rows(self, used: Tensor) -> Tensor:
        """The part of a vector of all rows that these have."""
        return used[self.number : self.number + self.rows]


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a flat buffer, equal to themselves alone: what is prepared for them is looked up at every step."""

    blocks: tuple[Block, ...]
