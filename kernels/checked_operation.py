"""An implementation of an operation behind what its operation checks and what its backend knows."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from .operands import Residual

P = ParamSpec("P")
R = TypeVar("R")
Supports = Mapping[str, Collection[torch.dtype]]  # by parameter
Unless = Callable[..., str]

logger = logging.getLogger(__name__)
MOST_STRUCTURES = 1024  # remembered for each implementation
NEW: Any = object()


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

    @property
    def checked(self) -> int:
        """The number of parameters that the check takes."""
        return 0 if self.check is None else len(inspect.signature(self.check).parameters)


class Pair(NamedTuple):
    """Two tensors of a call that share no memory: their numbers, their sizes in bytes, whether they may be the same."""

    first: int
    first_bytes: int
    second: int
    second_bytes: int
    may_be_same: bool


class Checked(Generic[P, R]):
    """A backend's implementation of an operation: called, it checks its arguments, or leaves them to another backend.

    `other`: which one, and its implementation, for a type of device. `supports`: the dtypes that this one knows; `unless`
    takes what the check takes and says what else it does not know, in words.
    Both, and the check, depend on the structure of the arguments alone, so what they say of a structure is remembered.
    Where tensors lie changes from step to step, so whether they overlap is looked at in each call.
    """

    def __init__(
        self,
        contract: Contract,
        backend: str,
        function: Callable[P, R],
        other: Callable[[str], tuple[str, Callable[P, R]]],
        supports: Supports,
        unless: Unless | None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.contract, self.backend, self.function, self.other = contract, backend, function, other
        self.supports, self.unless = supports, unless
        self.count = max([contract.checked, *(contract.parameters.index(name) + 1 for name in supports)])
        self.decided: dict[tuple[Any, ...], tuple[Pair, ...] | None] = {}  # None: another backend is to run

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        given: tuple[Any, ...] = args[: self.count]
        if kwargs and len(given) < self.count:
            given = self._by_position(args, kwargs)
        structure: list[Any] = []
        places: list[int] = []
        for each in given:
            kind = type(each)
            if each is None or kind is int:  # most that are no tensors are told apart at once
                structure.append(each)
            elif kind is Residual:
                structure.append(Residual)
                for part in each:
                    structure += part.dtype, part.shape, part.stride(), part.device
                    places.append(part.data_ptr())
            elif kind is Tensor or isinstance(each, Tensor):
                structure += each.dtype, each.shape, each.stride(), each.device
                places.append(each.data_ptr())
            else:
                structure.append(each)
        key = tuple(structure)
        pairs = self.decided.get(key, NEW)
        if pairs is NEW:
            pairs = self._judge(key, given)
        if pairs is None:
            return self.other(_device(args))[1](*args, **kwargs)
        for first, first_bytes, second, second_bytes, may_be_same in pairs:
            start, other = places[first], places[second]
            if start < other + second_bytes and other < start + first_bytes and not (may_be_same and start == other):
                self._refuse(given, first, second)
        return self.function(*args, **kwargs)

    def _by_position(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments that count, where some of them are given by name."""
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        return bound.args[: self.count]

    def _judge(self, key: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Pair, ...] | None:
        """Return what all arguments of this structure have in common. Raises if they do not fit; that is not remembered."""
        if len(self.decided) >= MOST_STRUCTURES:
            self.decided.clear()
        if unknown := self._unknown(given):
            log_unknown(self.backend, self.contract.name, unknown, self.other(_device(given))[0])
            self.decided[key] = None
        else:
            if self.contract.check:
                self.contract.check(*given[: self.contract.checked])
            self.decided[key] = tuple(self._pairs(given))
        return self.decided[key]

    def _unknown(self, given: tuple[Any, ...]) -> str:
        """Return in words what the backend does not support; empty if it supports everything."""
        tensors = [(name, tensor) for name, _, tensor in self._tensors(given) if name in self.supports]
        if unknown := {str(tensor.dtype) for name, tensor in tensors if tensor.dtype not in self.supports[name]}:
            return ", ".join(sorted(unknown))
        return self.unless(*given) if self.unless else ""

    def _pairs(self, given: tuple[Any, ...]) -> Iterator[Pair]:
        """The tensors that are to lie apart, each two once, but for those without elements."""
        numbered = [(number, *each) for number, each in enumerate(self._tensors(given)) if each[2].numel()]
        for (first, name, _, one), (second, other_name, _, other) in combinations(numbered, 2):
            same = name == other_name
            if same or any(name in group and other_name in group for group in self.contract.apart):
                yield Pair(first, span(one), second, span(other), same)

    def _tensors(self, given: tuple[Any, ...]) -> Iterator[tuple[str, str, Tensor]]:
        """The parameter, what messages call it, and the tensor, for all tensors among the arguments."""
        for name, argument in zip(self.contract.parameters, given, strict=False):
            yield from ((name, called, part) for called, part in _parts(name, argument) if isinstance(part, Tensor))

    def _refuse(self, given: tuple[Any, ...], first: int, second: int) -> None:
        names = [called for _, called, _ in self._tensors(given)]
        raise ValueError(f"{names[first]} and {names[second]} overlap in memory")


def _parts(name: str, argument: Any) -> tuple[tuple[str, Any], ...]:
    """An argument, or both tensors of a residual, and what messages call them."""
    if not isinstance(argument, Residual):
        return ((name, argument),)
    before, after = argument
    return (
        ((name, before), (name, after)) if before is after else ((f"{name}.before", before), (f"{name}.after", after))
    )


def _device(args: tuple[Any, ...]) -> str:
    return str(args[0].device.type)


def span(tensor: Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@functools.cache
def log_unknown(backend: str, operation: str, what: str, other: str) -> None:
    """Log, once, that another backend runs an operation in place of one, and for which tensors."""
    logger.info("%s %s does not know %s, the backend %s runs", backend, operation, what, other)
