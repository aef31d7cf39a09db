"""The choice of an operation's implementation: backends by device, the reference behind them all."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any, Generic, ParamSpec, TypeVar, overload

from torch import Tensor

from .contract import Contract, Limits, Pair, Supports, Unless, log_unknown
from .operands import Residual

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)
ENVIRONMENT_VARIABLE = "GRADWIRE_KERNELS"
REFERENCE = "reference"
MOST_STRUCTURES = 1024  # of arguments, remembered for each operation


@dataclass(frozen=True)
class Backend:
    """A set of implementations for one kind of device.

    `probe` returns "" where the backend works, else why it does not; it is asked once, on first use. One that is not
    `automatic` runs on explicit request only.
    """

    name: str
    device: str
    probe: Callable[[], str]
    automatic: bool = True
    _answer: list[str] = field(default_factory=list, repr=False, compare=False)

    @property
    def reason(self) -> str:
        """Why the backend is not available; empty when it is."""
        if not self._answer:
            self._answer.append(self.probe())
        return self._answer[0]

    @property
    def available(self) -> bool:
        """True if its kernels can run here."""
        return not self.reason


_backends: dict[str, Backend] = {REFERENCE: Backend(REFERENCE, "any", lambda: "")}
_operations: dict[str, Operation[Any, Any]] = {}
_requested: list[
    tuple[str, ...]
] = []  # the innermost last; of the whole process, since gradients are reduced on threads
_recordings: dict[int, set[str]] = {}  # of operations that run on the meta device, by identity


def register_backend(name: str, device: str, probe: Callable[[], str], automatic: bool = True) -> Backend:
    """Add a backend for tensors on `device` ("cpu", "cuda"); those added first are preferred.

    `automatic`: whether it may run without being asked for by name.
    """
    _backends[name] = Backend(name, device, probe, automatic)
    _choose_anew()
    return _backends[name]


def backends() -> list[Backend]:
    """Return all backends, the reference last."""
    return [*(b for b in _backends.values() if b.name != REFERENCE), _backends[REFERENCE]]


def operations() -> dict[str, Operation[Any, Any]]:
    """All operations by name."""
    return dict(_operations)


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Run operations on the named backends only, inside a `with`, on all threads. It overrides `GRADWIRE_KERNELS`.

    Dtypes and ranks that these backends do not support run on the reference.

    Args:
        names: names of backends, the preferred one first: "native", "triton", "cuda", "reference".

    Raises:
        ValueError: a name is unknown.
        RuntimeError: a backend does not work here. The message says why.
    """
    _check(names)
    _requested.append(names)
    _choose_anew()
    try:
        yield
    finally:
        _requested.pop()
        _choose_anew()


@contextmanager
def recorded_operations() -> Iterator[set[str]]:
    """Fill a set with the names of the operations that run on the meta device inside a `with`."""
    names: set[str] = set()
    _recordings[id(names)] = names
    try:
        yield names
    finally:
        del _recordings[id(names)]


def agree_on(device: str, choices: Mapping[str, str]) -> None:
    """Run operations on these backends, {operation: backend}, from now on, unless others are requested."""
    for name, backend in choices.items():
        _operations[name].agreed[device] = backend
    _choose_anew()


def _choose_anew() -> None:
    for each in _operations.values():
        each.choices = {}


def _check(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in _backends:
            raise ValueError(f"unknown kernel backend {name!r}; there are: {', '.join(_backends)}")
        if not _backends[name].available:
            raise RuntimeError(f"the kernel backend {name!r} does not work here: {_backends[name].reason}")


@functools.lru_cache(maxsize=1)
def _from_environment(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    _check(names)
    return names


def requested_backends() -> tuple[str, ...]:
    """The backends asked for by `use_backend` or the environment; empty means: the best that works."""
    return (
        _requested[-1] if _requested and _requested[-1] else _from_environment(os.environ.get(ENVIRONMENT_VARIABLE, ""))
    )


def requested_by() -> str:
    """Return what requests backends: `use_backend`, the environment variable, or nothing (empty)."""
    if _requested and _requested[-1]:
        return "use_backend"
    return ENVIRONMENT_VARIABLE if requested_backends() else ""


@functools.cache
def _log_fallback(backend: str, reason: str, level: int = logging.INFO) -> None:
    logger.log(level, "kernel backend %s is not available, the next one is used: %s", backend, reason)


Dispatch = tuple[Callable[..., Any], tuple[Pair, ...]]


class Operation(Generic[P, R]):
    """An operation: called, it runs the implementation for the device of its first argument, a tensor.

    Which one, and whether the arguments fit, depends on the structure of the arguments alone: dtypes, shapes, strides,
    devices, and what is no tensor. So it is found out once for a structure, and holds until other backends are requested by
    `use_backend`. Where tensors lie changes from step to step, so whether they overlap is looked at in each call. On the
    meta device nothing runs: most operations write into their arguments and return nothing; what returns a tensor says by
    `on_meta` which.
    """

    def __init__(
        self, reference: Callable[P, R], check: Callable[..., None] | None = None, apart: Sequence[Sequence[str]] = ()
    ) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.contract = Contract(self.name, tuple(inspect.signature(reference).parameters), check, apart)
        self.count = max(1, self.contract.checked)  # arguments that the structure is of
        self.reference = reference
        self.implementations: dict[str, Callable[P, R]] = {REFERENCE: reference}
        self.limits: dict[str, Limits] = {}  # by backend
        self.shape_only: Callable[P, R] | None = None
        self.choices: dict[tuple[Any, ...], Dispatch] = {}  # by the structure of arguments
        self.agreed: dict[str, str] = {}  # by type of device: the backend that all ranks have

    def implement(
        self, backend: str, supports: Supports | None = None, unless: Unless | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator: the implementation of this operation in a backend, which runs when its arguments are right.

        `supports`: the dtypes that it knows, by parameter, for those where not all are; `unless`: says in words what else
        it does not know of the arguments that the operation checks, empty where it knows them. The next backend does the
        rest, see `after`.
        """

        def add(function: Callable[P, R]) -> Callable[P, R]:
            self.implementations[backend] = function
            self.limits[backend] = Limits(supports or {}, unless)
            places = [self.contract.parameters.index(name) + 1 for name in supports or ()]
            self.count = max([self.count, *places])
            self.choices = {}
            return function

        return add

    def on_meta(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorator: what the operation returns for tensors on the meta device."""
        self.shape_only = function
        return function

    def chosen(self, device: str) -> str:
        """The name of the backend that runs tensors on `device`."""
        if names := requested_backends():
            return self._explicit(names, device)
        if device in self.agreed:
            return self.agreed[device]
        passed: list[Backend] = []
        for backend in _backends.values():
            if backend.automatic and backend.device == device and backend.name in self.implementations:
                if backend.available:
                    self._log(passed, logging.INFO)
                    return backend.name
                passed.append(backend)
        self._log(passed, logging.WARNING)  # what is left is slow
        return REFERENCE

    def offers(self, device: str) -> list[str]:
        """The backends that may run tensors on `device`, the preferred first: the requested one, or all that work."""
        if names := requested_backends():
            return [self._explicit(names, device)]
        fit = (each for each in _backends.values() if each.automatic and each.device == device)
        fitting = [each.name for each in fit if each.name in self.implementations and each.available]
        working = [*fitting, REFERENCE]
        return working[working.index(self.agreed.get(device, working[0])) :]  # never back to what other ranks lack

    def after(self, backend: str, device: str) -> str:
        """The backend that runs what `backend` does not know: the next one that works, the reference behind them all."""
        names = requested_backends() or [name for name, each in _backends.items() if each.automatic]
        behind = dropwhile(backend.__ne__, dict.fromkeys(names))
        next(behind, None)  # the backend itself
        for name in behind:
            each = _backends[name]
            if each.device in (device, "any") and name in self.implementations and each.available:
                return name
        return REFERENCE

    def _log(self, passed: Sequence[Backend], level: int) -> None:
        for backend in passed:
            _log_fallback(backend.name, backend.reason, level)

    def _explicit(self, names: tuple[str, ...], device: str) -> str:
        for name in names:
            if _backends[name].device in (device, "any") and name in self.implementations:
                return name
        raise RuntimeError(
            f"no requested kernel backend ({', '.join(names)}) has {self.name!r} for {device} tensors; "
            f"it exists in: {', '.join(self.implementations)}"
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if args[0].is_meta:  # type: ignore[attr-defined]
            return self._without_numbers(*args, **kwargs)
        given: tuple[Any, ...] = args[: self.count]
        if kwargs and len(given) < self.count:
            given = inspect.signature(self.reference).bind(*args, **kwargs).args[: self.count]
        structure: list[Any] = []
        tensors: list[Tensor] = []
        for each in given:
            kind = type(each)
            if each is None or kind is int:  # most that are no tensors are told apart at once
                structure.append(each)
            elif kind is Residual:
                structure.append(Residual)
                for part in each:
                    structure += part.dtype, part.shape, part.stride(), part.device
                tensors += each
            elif kind is Tensor or isinstance(each, Tensor):
                structure += each.dtype, each.shape, each.stride(), each.device
                tensors.append(each)
            else:
                structure.append(each)
        key, choices = tuple(structure), self.choices  # an earlier choice must not enter a later dict
        choice = choices.get(key)
        if choice is None:
            choice = self._choose(given)
            if len(choices) >= MOST_STRUCTURES:
                choices.clear()
            choices[key] = choice
        function, pairs = choice
        if pairs:
            places = list(map(Tensor.data_ptr, tensors))
            for first, first_bytes, second, second_bytes, may_be_same in pairs:
                start, other = places[first], places[second]
                if (
                    start < other + second_bytes
                    and other < start + first_bytes
                    and not (may_be_same and start == other)
                ):
                    names = [called for _, called, _ in self.contract.tensors(given)]
                    raise ValueError(f"{names[first]} and {names[second]} overlap in memory")
        return function(*args, **kwargs)  # type: ignore[no-any-return]

    def _choose(self, given: tuple[Any, ...]) -> Dispatch:
        """Return what runs arguments of a structure, and which of them must not overlap. Raise if they do not fit."""
        device = given[0].device.type
        name = self.chosen(device)
        while name != REFERENCE:
            unknown = self.limits.get(name, Limits()).unknown(self.contract, given)
            if not unknown:
                return self.implementations[name], self.contract.judge(given)
            other = self.after(name, device)
            log_unknown(name, self.name, unknown, other)
            name = other
        return self.implementations[REFERENCE], ()  # torch checks

    def _without_numbers(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what the operation returns on the meta device, and note that it would run."""
        for names in list(_recordings.values()):  # other threads may begin and end some
            names.add(self.name)
        return (self.shape_only or _nothing)(*args, **kwargs)


def _nothing(*_: Any, **__: Any) -> Any:
    """Do nothing, as most operations do on the meta device."""


@overload
def operation(reference: Callable[P, R]) -> Operation[P, R]: ...


@overload
def operation(
    *, check: Callable[..., None], apart: Sequence[Sequence[str]] = ()
) -> Callable[[Callable[P, R]], Operation[P, R]]: ...


def operation(
    reference: Callable[..., Any] | None = None,
    *,
    check: Callable[..., None] | None = None,
    apart: Sequence[Sequence[str]] = (),
) -> Any:
    """Decorator: make a pure-torch function the reference of an operation of its name.

    `check` and `apart` say what every backend but the reference, which leaves that to torch, refuses: see `Contract`.
    """
    if reference is None:
        return functools.partial(operation, check=check, apart=apart)
    made = Operation(reference, check, apart)
    _operations[made.name] = made
    return made
