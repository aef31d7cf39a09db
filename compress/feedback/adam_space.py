"""Compression in units of Adam's denominator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels import Residual
from ..algorithms.powersgd import joined, pieces
from ..protocol.compressor import Compressor
from ..protocol.layout import Layout
from ..protocol.requests import Program
from ..state.tensors import PerParameter
from ..state.tree import Leaves

MEMORY = 0.99  # the share of the mean square before a step in the one after it
FLOOR = 0.1  # of a scale, in units of the bucket's mean scale


class HeldInside:
    """The residuals inside a state, and the elements of the bucket that they stand for."""

    def __init__(self, state: Any, layout: Layout) -> None:
        starts = dict(zip(layout.names, layout.offsets, strict=True))
        self._placed = [
            (leaf, joined((starts[name] + first, part.numel()) for name, first, part in leaf.pieces()))
            for leaf in Leaves(state).residuals
        ]

    def multiply(self, factors: Tensor) -> None:
        """Multiply it, each element by that of the bucket's flat `factors`, as a part of the step."""
        for leaf, places in self._placed:
            if places and not leaf.cleared:
                step = leaf.open()
                step.in_place().mul_(torch.cat(pieces(factors, places)))
                leaf.close(step)


@dataclass
class AdamSpaceState:
    """The root of a running mean square of the averages, the same on all ranks; the inner state, and what it holds back."""

    root: PerParameter
    inner: Any
    held: HeldInside


@dataclass(frozen=True)
class AdamSpace:
    """Compresses in units of sqrt(v) + eps, v a running mean square of the averages that all ranks have got so far.

    Elements that an optimizer like Adam will divide by little count for much. Units are relative to their mean over the
    bucket, so they depend neither on the loss scale nor on how v's bias is corrected. Between two steps what is held back is
    in units of gradients, as everywhere.
    """

    inner: Compressor

    def init(self, layout: Layout) -> AdamSpaceState:
        """No averages so far: all units are alike."""
        inner = self.inner.init(layout)
        return AdamSpaceState(PerParameter.zeros(layout), inner, HeldInside(inner, layout))

    def reduce(self, grad: Tensor, state: AdamSpaceState, residual: Residual | None = None) -> Program[Tensor]:
        """The inner average, taken in these units."""
        root = state.root.flat
        mean = root.mean(dtype=torch.float64).to(root.dtype)  # the same bits whatever the number of threads
        units = root.div(mean).nan_to_num_(1.0).add_(FLOOR)  # the mean of all is a little above 1
        state.held.multiply(1 / units)
        held = None
        if residual is None:
            grad.div_(units)
        else:
            held = Residual(residual.after, residual.after)
            residual.plus(grad).div_(units)
            grad.zero_()
        average = yield from self.inner.reduce(grad, state.inner, held)
        average.mul_(units)
        state.held.multiply(units)
        if held is not None:
            held.after.mul_(units)
        before, after = state.root.update()
        torch.hypot(before * math.sqrt(MEMORY), average * math.sqrt(1 - MEMORY), out=after)  # no square overflows
        return average
