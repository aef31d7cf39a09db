"""Requirements of an operation on its arguments, and what a backend's implementation knows of them."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operands import Residual

Supports = Mapping[str, Collection[torch.dtype]]  # by parameter
Unless = Callable[..., str]

logger = logging.getLogger(__name__)


class Pair(NamedTuple):
    """Two tensors of a call that share no memory: their numbers, their sizes in bytes, whether they may be the same."""

    first: int
    first_bytes: int
    second: int
    second_bytes: int
    may_be_same: bool


@dataclass(frozen=True)
class Contract:
    """The requirements of an operation on its arguments, whatever its backend.

    `check` takes the first parameters of the operation, raises for what does not fit, and may look at dtypes, shapes,
    strides, devices and whatever is no tensor, but not at addresses or numbers. `apart`: groups of parameters, of which no
    two share memory; the two tensors of a residual may be the same memory.
    """

    name: str
    parameters: tuple[str, ...]
    check: Callable[..., None] | None = None
    apart: Sequence[Sequence[str]] = ()

    @functools.cached_property
    def checked(self) -> int:
        """The number of parameters that the check takes."""
        return 0 if self.check is None else len(inspect.signature(self.check).parameters)

    def judge(self, given: tuple[Any, ...]) -> tuple[Pair, ...]:
        """Check the arguments; return those of its tensors that have elements and are to lie apart, each two once."""
        if self.check:
            self.check(*given[: self.checked])
        numbered = [(number, *each) for number, each in enumerate(self.tensors(given)) if each[2].numel()]
        return tuple(
            Pair(first, span(one), second, span(other), name == other_name)
            for (first, name, _, one), (second, other_name, _, other) in combinations(numbered, 2)
            if name == other_name or any(name in group and other_name in group for group in self.apart)
        )

    def tensors(self, given: tuple[Any, ...]) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the parameter, what messages call it, and the tensor, for all tensors among the arguments."""
        for name, argument in zip(self.parameters, given, strict=False):
            yield from ((name, called, part) for called, part in _parts(name, argument) if isinstance(part, Tensor))


def _parts(name: str, argument: Any) -> tuple[tuple[str, Any], ...]:
    """An argument, or both tensors of a residual, and what messages call them."""
    if not isinstance(argument, Residual):
        return ((name, argument),)
    before, after = argument
    return (
        ((name, before), (name, after)) if before is after else ((f"{name}.before", before), (f"{name}.after", after))
    )


def span(tensor: Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@dataclass(frozen=True)
class Limits:
    """The dtypes that an implementation knows, by parameter, and what else it does not know, in words: see `implement`."""

    supports: Supports = field(default_factory=dict)
    unless: Unless | None = None

    def unknown(self, contract: Contract, given: tuple[Any, ...]) -> str:
        """Return in words what the implementation does not know of the arguments; empty if it knows everything."""
        tensors = [(name, tensor) for name, _, tensor in contract.tensors(given) if name in self.supports]
        if unknown := {str(tensor.dtype) for name, tensor in tensors if tensor.dtype not in self.supports[name]}:
            return ", ".join(sorted(unknown))
        return self.unless(*given) if self.unless else ""


@functools.cache
def log_unknown(backend: str, operation: str, what: str, other: str) -> None:
    """Log, once, that another backend runs an operation in place of one, and for which tensors."""
    logger.info("%s %s does not know %s, the backend %s runs", backend, operation, what, other)
