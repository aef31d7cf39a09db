"""What direct collectives are to whoever carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

Kind: TypeAlias = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce"]


class Way(Protocol):
    """How blocks get to ranks. Tensors are flat, contiguous and of one size and type; calls return when all is there."""

    def all_gather(self, outputs: Sequence[Tensor], block: Tensor) -> None:
        """Write every rank's `block` to its output, which this rank's may be already."""

    def all_to_all(self, outputs: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Write every rank's row for this one to its output."""

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor]) -> None:
        """Write to `output` the sum over ranks of the rows for this one; `rows` has one for each rank.

        The row for this rank may be `output` itself.
        """
