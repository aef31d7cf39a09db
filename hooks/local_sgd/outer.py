"""The outer optimizer and its presets: the use of the mean difference between the common model and those trained from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from ...compress.builder.optimizer_defaults import kinds

METHODS = ("nesterov", "sgd")
PRESETS = {
    "average": "sgd:lr=1,momentum=0",  # of models: local SGD
    "diloco": "nesterov:lr=0.7,momentum=0.9",  # Douillard et al. 2023
    "muloco": "nesterov:lr=0.7,momentum=0.6",  # arXiv 2505.23725, one site and 30 steps between averages
    "slowmo": "sgd:lr=1,momentum=0.5",  # arXiv 1910.00643; its authors' default in FairScale, for 8 hosts
}


@dataclass(frozen=True)
class Outer:
    """Momentum SGD on differences, as torch.optim.SGD computes it (Wang et al. 2019; Douillard et al. 2023).

    `sgd:lr=1,momentum=0` is plain averaging; with momentum it is SlowMo, whose slow learning rate is `lr`.
    """

    lr: float
    momentum: float
    nesterov: bool

    def step(self, anchor: Tensor, difference: Tensor, momentum: Tensor) -> None:
        """Move `anchor` by the mean `difference`, which is overwritten; `momentum` is what it remembers."""
        momentum.mul_(self.momentum).add_(difference)
        moved = difference.add_(momentum, alpha=self.momentum) if self.nesterov else momentum
        anchor.sub_(moved, alpha=self.lr)


def suited(optimizers: Sequence[object]) -> str:
    """Return the preset for a model's optimizers: "muloco" for Muon, which ends as low with it or lower, else "average"."""
    known = [each for each in optimizers if isinstance(each, Optimizer)]
    return "muloco" if known and "Muon" in kinds(known) else "average"


def outer(specification: str) -> Outer:
    """Return the outer optimizer of "nesterov:lr=0.7,momentum=0.9", or of a preset's name. Raises ValueError for others.

    >>> outer("sgd:lr=1,momentum=0.5")
    Outer(lr=1.0, momentum=0.5, nesterov=False)
    >>> outer("diloco") == outer("nesterov:lr=0.7,momentum=0.9")
    True
    """
    method, _, rest = PRESETS.get(str(specification), str(specification)).partition(":")
    values = {"lr": 0.7, "momentum": 0.9} if method == "nesterov" else {"lr": 1.0, "momentum": 0.0}
    allowed = (
        f"an outer optimizer is {', '.join(PRESETS)}, or {' or '.join(METHODS)}, with lr and momentum, such as "
        "nesterov:lr=0.7,momentum=0.9"
    )
    if method not in METHODS:
        raise ValueError(f"{allowed}; got {specification!r}")
    for option in filter(None, rest.split(",")):
        key, _, value = option.partition("=")
        if key not in values:
            raise ValueError(f"{allowed}; got {specification!r}")
        try:
            values[key] = float(value)
        except ValueError:
            raise ValueError(f"{key} is a number; {specification!r} has {value!r}") from None
    if not 0 < values["lr"] < float("inf") or not 0 <= values["momentum"] < 1:
        raise ValueError(f"lr is above 0 and momentum from 0 to below 1; got {specification!r}")
    return Outer(values["lr"], values["momentum"], method == "nesterov")
