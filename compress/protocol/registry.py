"""The table of compressors by name: a file in algorithms/ registers its own, and the baselines are named here."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar, get_type_hints

from .compressor import Compressor, Declared, Traits, with_traits

C = TypeVar("C", bound=type)
OF_FEEDBACK: dict[str, tuple[Any, Any]] = {  # options of every lossy method: (type, default)
    "error_feedback": (bool | float, True),
    "momentum": (float, 0.0),
    "residual_bits": (int, 32),
}
OF_CODECS = {"takes_16_bits", "keeps_zeros", "blocks", "draws"}  # the traits that a codec may have
OF_ALL: dict[str, tuple[Any, Any]] = {"start_iter": (int, 0), "warmup": (Compressor, "none")}


@dataclass(frozen=True)
class Registration:
    """A registered method: its class, the adapter that makes it a compressor, and whether it loses gradient.

    `error_feedback`: the part of a residual that it keeps unless a specification says otherwise.
    """

    name: str
    factory: type
    adapter: Callable[[Any], Compressor] | None
    lossy: bool
    error_feedback: float = 1.0

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """{option: (type, default)} of everything a specification may set."""
        hints = get_type_hints(self.factory)
        fields = [f for f in dataclasses.fields(self.factory) if f.init and f.name != "inner"]
        own = {f.name: (hints[f.name], f.default) for f in fields}
        return {**own, **self.shared}

    @property
    def shared(self) -> dict[str, tuple[Any, Any]]:
        """The options that wrappers answer for; an option of the method's own goes before one of its name."""
        own = {field.name for field in dataclasses.fields(self.factory)}
        listed = {**(OF_FEEDBACK if self.lossy else {}), **({} if self.name == "none" else OF_ALL)}
        if self.lossy:
            kept = self.error_feedback
            listed |= {"error_feedback": (bool | float, kept if 0 < kept < 1 else kept > 0)}
        return {option: each for option, each in listed.items() if option not in own}

    @property
    def wraps(self) -> bool:
        """True if the name may stand left of a "+"."""
        return any(field.name == "inner" for field in dataclasses.fields(self.factory))

    @property
    def summary(self) -> str:
        """The first line of its description."""
        return (inspect.getdoc(self.factory) or "").partition("\n")[0]


registered: dict[str, Registration] = {}
# Modules beside the others, each imported when it is named: compressors of papers, for comparisons.
BASELINES = ("adacomp", "chunktopk", "dropping", "natural", "qsgd", "randomk", "ternary", "terngrad")


def find(name: str) -> Registration | None:
    """Return the method of a name, if it is registered; a baseline is imported first."""
    if name in BASELINES and name not in registered:
        import_module(f"...baselines.{name}", __name__)
    return registered.get(name)


def register(
    name: str,
    *,
    adapter: Callable[[Any], Compressor] | None = None,
    lossy: bool = True,
    error_feedback: float = 1.0,
    traits: Declared | None = None,
) -> Callable[[C], C]:
    """Class decorator: make a frozen dataclass available under `name`. It gets the options `start_iter` and `warmup`.

    Args:
        name: the compressor's name.
        adapter: makes a compressor of a codec: `Gathered` or `TwoShot`.
        lossy: True adds the options of error feedback.
        error_feedback: the part of a residual that the compressor keeps by default. 1 keeps all, 0 turns error feedback off.
        traits: the properties that gradwire may rely on, or a function that returns them for an object.

    Returns:
        The decorator.

    Raises:
        ValueError: the name is taken, `error_feedback` is not from 0 to 1, or `traits` contradict the other arguments.
        TypeError: the decorated class is not a frozen dataclass.
    """
    if not 0 <= error_feedback <= 1:
        raise ValueError(f"{name}:error_feedback is by default from 0 to 1, got {error_feedback}")
    if isinstance(traits, Traits):
        _check_traits(name, traits, adapter is not None, lossy)

    def add(factory: C) -> C:
        if not dataclasses.is_dataclass(factory):
            raise TypeError(
                f"@register({name!r}) needs a frozen dataclass of the compressor's options, got {factory!r}"
            )
        known = registered.get(name)
        if known is not None and _full_name(known.factory) != _full_name(factory):
            raise ValueError(f"the name {name!r} is taken by {_full_name(known.factory)}; register under another")
        registered[name] = Registration(name, factory, adapter, lossy, error_feedback)
        return factory if traits is None else with_traits(traits)(factory)

    return add


def _check_traits(name: str, traits: Traits, is_codec: bool, lossy: bool) -> None:
    """Raise ValueError for traits that a codec, a compressor or a lossy method cannot have."""
    given = {name for name, value in vars(traits).items() if value != vars(Traits())[name]}
    refused = given - OF_CODECS if is_codec else given & {"keeps_zeros", "draws"}
    if refused:
        kind, other = ("a codec", "its adapter declares") if is_codec else ("a compressor", "only codecs have")
        raise ValueError(f"{name!r} is {kind}, and {other} {', '.join(sorted(refused))}: leave it out of traits")
    if traits.averages and lossy:
        raise ValueError(f"{name!r} averages, so it loses nothing: register it with lossy=False")


def _full_name(factory: type) -> str:
    """Return where a class is defined: the same when a module or a notebook cell runs again."""
    return f"{factory.__module__}.{factory.__qualname__}"
