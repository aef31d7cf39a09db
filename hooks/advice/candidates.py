"""The compressors to choose from, and the loss that each costs: the study of docs/results/quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from ...compress.builder.optimizers import kinds

ADAM, SGD = "Adam", "SGD"
UNCOMPRESSED = ("none", "bf16")  # what a user gets without giving anything up
PRIORITY, BACKWARD = "priority", "backward"
TWO_LEVELS = "hosts+"


@dataclass(frozen=True)
class Method:
    """A specification, and by how much a held-out loss ends above that of none with it, relative to that; by family of
    optimizers: the GPT's with AdamW, and the worse of the ResNet's and the LSTM's with SGD and momentum. None: not studied.

    `dense_start`: the study had the first steps without compression, and so should a user.
    """

    spec: str
    adam: float | None = None
    sgd: float | None = None
    dense_start: bool = False

    def loss(self, family: str) -> float | None:
        """With a family of optimizers."""
        return self.adam if family == ADAM else self.sgd


METHODS = (
    Method("none", 0.0, 0.0),
    Method("bf16", -0.002, 0.000),
    Method("int8", 0.000, 0.001, dense_start=True),
    Method("int4", 0.000, 0.003, dense_start=True),
    Method("int2", 0.007, 0.005, dense_start=True),
    Method("powersgd:rank=4", 0.020, 0.019, dense_start=True),
    Method("powersgd:rank=8,payload=int8", 0.005, 0.007, dense_start=True),
    Method("bf16+powersgd:rank=2", 0.042, 0.040, dense_start=True),
    Method("topk:ratio=0.01,feedback=0.9", 0.037, 0.056),
    Method("onebit", 0.033, 0.058, dense_start=True),
)


def family(optimizer: Optimizer) -> str:
    """Return the family of an optimizer, one of the two for which the study reports losses."""
    return ADAM if kinds(optimizer) == {ADAM} else SGD


def methods(specs: Sequence[str] | None) -> list[Method]:
    """The methods of some specifications, "none" always among them; all of the study where none are given.

    A two-level method loses what its inner one does.
    """
    known = {method.spec: method for method in METHODS}
    if specs is None:
        return list(METHODS)
    return [known.get(spec, Method(spec)) for spec in dict.fromkeys(["none", *specs])]
