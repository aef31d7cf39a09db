"""Notices gradients that were averaged, then thrown away: what error feedback keeps of them comes back."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEW, NUMBERS = 3, 64  # parameters that are watched, and how many numbers of each
MESSAGE = (
    "gradients were averaged and then cleared, with no optimizer step between: what compression holds back of them comes "
    "back with later ones. Run a backward whose gradients you throw away inside no_sync(), or call discard_step() of the "
    "handle after it"
)


@dataclass(frozen=True)
class Seen:
    """A parameter at the beginning of a step."""

    version: int
    gradient: weakref.ref[Tensor] | None
    numbers: Tensor

    def cleared(self, then: Seen) -> bool:
        """Whether its gradient was cleared since `then`, and the parameter not written to, as far as its version tells."""
        before = then.gradient and then.gradient()
        kept = before is not None and self.gradient is not None and before is self.gradient()
        return then.gradient is not None and not kept and self.version == then.version


class ThrownAway:
    """Warns once. It watches the smallest `parameters` of the first bucket, until then."""

    def __init__(self) -> None:
        self.parameters: Sequence[Tensor] = ()
        self._seen: list[Seen] = []
        self._told = False

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Look at some of these from the next step on, unless it has warned already."""
        self.parameters, self._seen = () if self._told else sorted(parameters, key=Tensor.numel)[:FEW], []

    def look(self, *, counts: bool) -> None:
        """At the beginning of a step, when the first bucket's gradients are there. `counts`: the step before does."""
        before, self._seen = self._seen, [_seen(parameter) for parameter in self.parameters]
        pairs = list(zip(self._seen, before, strict=False))
        if not (counts and before and all(now.cleared(then) for now, then in pairs)):
            return
        if all(torch.equal(now.numbers, then.numbers) for now, then in pairs):
            self._told = True
            warnings.warn(MESSAGE, stacklevel=2)
        self.watch(())  # written through .data the version tells nothing, and comparing numbers would hold up a GPU


def _seen(parameter: Tensor) -> Seen:
    gradient = None if parameter.grad is None else weakref.ref(parameter.grad)
    return Seen(parameter._version, gradient, parameter.detach().flatten()[:NUMBERS].clone())
