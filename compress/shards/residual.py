"""The residual of a rank for the gradients of all shards: in full, or in 8 bits an element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import Residual
from ..algorithms.quantized import Int8
from ..state.tensors import Entries, FlatLeaf
from .layout import ShardLayout

WIDTHS = (32, 8)  # bits of an element that is held back; 32: as wide as arithmetic is


@dataclass
class ShardResidual(FlatLeaf):
    """Numbers of all ranks' rows, saved in the shapes of whole parameters."""

    layout: ShardLayout
    flat: Tensor

    @classmethod
    def zeros(cls, layout: ShardLayout) -> ShardResidual:
        """Nothing is held back yet."""
        whole = layout.whole.widened()
        return cls(layout, torch.zeros(layout.numel, dtype=whole.dtype, device=whole.device))

    def numbers(self) -> Tensor:
        """Return the residual of all rows, flat; it may be the leaf's own memory."""
        return self.flat

    def set(self, numbers: Tensor) -> None:
        """Hold back these, between two steps."""
        self._zeros = None
        self.flat.copy_(numbers)

    def row(self, step: Residual, rank: int) -> Residual:
        """Return the residual of a rank's row; `step`: of `update`."""
        part = slice(rank * self.layout.row, (rank + 1) * self.layout.row)
        return Residual(step.before[part], step.after[part])

    def put_row(self, step: Residual, rank: int, row: Residual) -> None:
        """`row`, of the method above, has what the step holds back of it."""

    def save(self, field: str) -> Entries:
        return {name: {field: whole} for name, whole in self.layout.joined(self.numbers()).items()}

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        numbers = self.numbers()
        shapes = dict(zip(self.layout.whole.names, self.layout.whole.shapes, strict=True))
        for name, shape in shapes.items():
            saved = entries.get(name, {}).get(field)
            if saved is not None and tuple(saved.shape) != shape:
                raise ValueError(
                    f"the saved {field!r} of parameter {name!r} has shape {tuple(saved.shape)}, but {shape} is needed "
                    "here: load the state with the model that saved it"
                )
            if saved is not None:
                self.layout.cut(name, saved, numbers)
        self.set(numbers)
        return {}

    def held_back(self) -> dict[str, Tensor]:
        return {name: whole.view(-1) for name, whole in self.layout.joined(self.numbers()).items()}


@dataclass
class NarrowShardResidual(ShardResidual):
    """The same in 8 bits an element and a scale a block (LoCo: Xie et al. 2024): `flat` is bytes, a row a rank.

    Half a 127th of the largest magnitude of its block is the most that is forgotten of an element in a step.
    """

    codec = Int8()

    @classmethod
    def zeros(cls, layout: ShardLayout) -> NarrowShardResidual:
        rows = layout.whole.ranks.world_size, cls.codec.row_bytes(cls.codec.row_length(layout.row))
        return cls(layout, torch.zeros(rows, dtype=torch.uint8, device=layout.whole.device))

    def numbers(self) -> Tensor:
        """Copies."""
        return torch.cat([self._decoded(self.flat, rank) for rank in range(len(self.flat))])

    def set(self, numbers: Tensor) -> None:
        self._zeros = None
        for rank, row in enumerate(numbers.view(len(self.flat), -1)):
            self._encode(row, self.flat, rank)

    def row(self, step: Residual, rank: int) -> Residual:
        """Copies."""
        numbers = self._decoded(step.before, rank)
        return Residual(numbers, numbers)

    def put_row(self, step: Residual, rank: int, row: Residual) -> None:
        self._encode(row.after, step.after, rank)

    def multiply(self, factor: float) -> None:
        cleared, numbers = self.cleared, self.numbers().mul_(factor)
        self.flat = torch.empty_like(self.flat)
        self.set(numbers)
        self._zeros = self.flat if cleared else None

    def _decoded(self, rows: Tensor, rank: int) -> Tensor:
        row, length = self.layout.row, self.codec.row_length(self.layout.row)
        numbers = torch.empty(row, dtype=self.layout.whole.widened().dtype, device=rows.device)
        self.codec.decode(rows[rank : rank + 1].unsqueeze(0), numbers, length)
        return numbers

    def _encode(self, numbers: Tensor, rows: Tensor, rank: int) -> None:
        self.codec.encode(numbers, None, rows[rank : rank + 1], self.codec.row_length(self.layout.row))
