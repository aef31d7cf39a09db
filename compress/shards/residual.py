"""The residual of a rank for the gradients of all shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..state.leaf import WIDTHS, Entries, FlatLeaf, Narrow
from ..state.tensors import zeros
from .layout import ShardLayout


@dataclass
class ShardResidual(FlatLeaf):
    """Numbers of the rows of a layout, saved in the shapes of whole parameters. `store`: has as many rows."""

    layout: ShardLayout
    flat: Tensor
    store: Narrow | None = None

    @classmethod
    def zeros(cls, layout: ShardLayout, bits: int = WIDTHS[0]) -> ShardResidual:
        """Nothing is held back yet; elements are kept in so many `bits`."""
        whole = layout.whole.widened()
        return cls(layout, *zeros(layout.row, whole.dtype, whole.device, bits, len(layout.rows)))

    def save(self, field: str) -> Entries:
        return {name: {field: whole} for name, whole in self.layout.joined(self.wide()).items()}

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        numbers = self.layout.spread(self.wide())
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
        self.set(self.kept(numbers))
        return {}

    def kept(self, every: Tensor) -> Tensor:
        """Return the rows that this rank keeps, given those of all ranks.

        Raises ValueError where there is anything in others: it would be lost.
        """
        mine = self.layout.kept(every)
        if mine is not every and int(mine.count_nonzero()) < int(every.count_nonzero()):
            raise ValueError(
                f"hosts of {self.layout.whole.ranks.per_host} ranks keep the residuals of fewer shards on a rank than there "
                "are: load the states of all ranks with resize=True; for a swap, swap(reduce='none') one step earlier"
            )
        return mine

    def held_back(self) -> dict[str, Tensor]:
        return {name: whole.view(-1) for name, whole in self.layout.joined(self.wide()).items()}
