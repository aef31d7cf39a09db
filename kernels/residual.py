"""The residual of error feedback, before a step and after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Residual(NamedTuple):
    """The residual of error feedback, as two flat tensors of one layout, which may share memory.

    Attributes:
        before: the residual before a step. It is only read, unless it shares memory with `after`.
        after: the residual after the step. The kernel or compressor writes all of it.
    """

    before: Tensor
    after: Tensor

    def plus(self, grad: Tensor) -> Tensor:
        """Write `before` + `grad` to `after`.

        Args:
            grad: the gradient, flat.

        Returns:
            `after`.
        """
        return torch.add(self.before, grad, out=self.after)

    def in_place(self) -> Tensor:
        """Return `after` as a copy of `before`, for arithmetic in place. Nothing is copied if they share memory."""
        if self.before is not self.after:
            self.after.copy_(self.before)
        return self.after
