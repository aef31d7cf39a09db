"""The table of compression methods by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from .protocol import Compressor

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Registration:
    """A registered method: its class, the adapter that makes it a compressor, and whether it loses gradient."""

    name: str
    factory: type
    adapter: Callable[[Any], Compressor] | None
    lossy: bool
    feedback: bool = True

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """{option: (type, default)} of everything a specification may set."""
        hints = get_type_hints(self.factory)
        own = {f.name: (hints[f.name], f.default) for f in dataclasses.fields(self.factory) if f.name != "inner"}
        shared: dict[str, tuple[Any, Any]] = {"start_iter": (int, 0), "warmup": (Compressor, "none")}
        feedback = {"error_feedback": (bool, self.feedback)} if self.lossy else {}
        return {**own, **feedback, **({} if self.name == "none" else shared)}

    @property
    def wraps(self) -> bool:
        """Whether it may stand left of a "+"."""
        return any(field.name == "inner" for field in dataclasses.fields(self.factory))

    @property
    def summary(self) -> str:
        """The first line of its description."""
        return (inspect.getdoc(self.factory) or "").partition("\n")[0]


registered: dict[str, Registration] = {}


def register(
    name: str,
    *,
    adapter: Callable[[Any], Compressor] | None = None,
    lossy: bool = True,
    feedback: bool = True,
) -> Callable[[C], C]:
    """Class decorator: make a frozen dataclass available under `name`.

    `adapter` turns a codec into a compressor (`Gathered`, `TwoShot`). A `lossy` method gets the option `error_feedback`,
    on by default if `feedback` is. Every method gets `start_iter` and `warmup`.
    """

    def add(factory: C) -> C:
        if not dataclasses.is_dataclass(factory):
            raise TypeError(f"@register({name!r}) needs a frozen dataclass of the method's options, got {factory!r}")
        known = registered.get(name)
        if known is not None and _full_name(known.factory) != _full_name(factory):
            raise ValueError(f"the name {name!r} is taken by {_full_name(known.factory)}; register under another")
        registered[name] = Registration(name, factory, adapter, lossy, feedback)
        return factory

    return add


def _full_name(factory: type) -> str:
    """Where a class is defined: the same when a module or a notebook cell runs again."""
    return f"{factory.__module__}.{factory.__qualname__}"
