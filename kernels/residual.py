"""The residual of error feedback, before a step and after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Residual(NamedTuple):
    """Two flat tensors of one layout: what was held back `before` a step, and what is held back `after` it.

    Whoever is given one reads `before` and writes all of `after`. They may be the same memory. Where they are not, a step
    can be taken back by going on from `before`, which nobody has written to.
    """

    before: Tensor
    after: Tensor

    def plus(self, grad: Tensor) -> Tensor:
        """`after`, with `before` + `grad` in it."""
        return torch.add(self.before, grad, out=self.after)

    def in_place(self) -> Tensor:
        """`after`, with what was held before in it: for arithmetic that works in place, at the price of a copy."""
        if self.before is not self.after:
            self.after.copy_(self.before)
        return self.after
