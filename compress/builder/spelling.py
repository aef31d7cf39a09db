"""Options from text to their types, and the messages for unknown names and wrong values, of calls as well."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from numbers import Integral
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from ..protocol.registry import Registration

P = ParamSpec("P")
R = TypeVar("R")
A_WIDTH = re.compile(
    r"(u?int|(mx|nv|n|b)?f|(mx|nv)?fp|b?float|bits?|q)?[\W_]*(?P<bits>\d+)[\W_]*(bits?)?", re.IGNORECASE
)
OF_WIDTH = {"1": "onebit", "2": "int2", "4": "int4", "8": "int8", "16": "bf16", "32": "none"}
OF_BITS = " (by bits there are bf16, fp16, int8, int4, int2 and onebit)"


def option_value(method: Registration, key: str, value: Any) -> Any:
    """An option's value in the option's type."""
    if key not in (options := method.options):
        hint = did_you_mean(key, options, f"={value}")
        raise ValueError(f"{method.name!r} has no option {key!r}{hint}; it has: {', '.join(options) or 'none'}")
    expected = options[key][0]
    if key == "warmup":
        return value
    try:
        return _converted(value, expected)
    except (KeyError, OverflowError, TypeError, ValueError):
        described = getattr(expected, "__name__", None) or str(expected).replace("bool |", "true, false or a")
        allowed = ", ".join(map(str, get_args(expected))) if get_origin(expected) is Literal else described
        raise ValueError(f"{method.name}:{key} takes {allowed}, got {value!r}") from None


def _converted(value: Any, expected: Any) -> Any:
    """`value`, a string or already typed, as `expected`; ValueError where it is not one."""
    if expected == bool | float:
        word = {"true": True, "false": False}.get(str(value).lower())
        return float(value) if word is None else word
    if get_origin(expected) in (Union, types.UnionType):
        kind = next(kind for kind in get_args(expected) if kind is not type(None))
        return None if value in (None, "none") else _converted(value, kind)
    if expected is bool:
        return {"true": True, "false": False}[str(value).lower()]
    if expected is int:
        number = float(value)
        if isinstance(value, bool) or number != int(number):
            raise ValueError(value)
        return int(number)
    if get_origin(expected) is Literal and value not in get_args(expected):
        raise ValueError(value)
    return float(value) if expected is float else value


def did_you_mean(name: str, names: Iterable[str], end: str = "") -> str:
    """A hint to put behind an unknown name; nothing where none of `names` is near. `end`: stands behind the name.

    >>> did_you_mean("resnet5", ["mlp", "resnet50"]), did_you_mean("x", ["mlp"])
    (" (did you mean 'resnet50'?)", '')
    """
    near = get_close_matches(name, list(names), 1)
    return f" (did you mean {near[0] + end!r}?)" if near else ""


def compressor_meant(name: str, names: Iterable[str]) -> str:
    """A hint to put behind the unknown name of a compressor: a number of bits, two compressors of FSDP2, two without a +.

    >>> compressor_meant("4-bit", ["int4", "onebit"]), compressor_meant("top-k", ["topk"])
    (" (did you mean 'int4'?)", " (did you mean 'topk'?)")
    """
    if name == "torch":
        return " (in gradwire try it stands for a run without attach: leave attach out where the compressor is 'torch')"
    width = A_WIDTH.fullmatch(name)
    if width:
        meant = OF_WIDTH.get(width["bits"], "")
        wide = meant in ("bf16", "none") and "int" in name.lower()
        return f" (did you mean {meant!r}?)" if meant and not wide else OF_BITS
    if "/" in name:
        gather, _, reduce = name.partition("/")
        return (
            f" (two compressors are FSDP2's: attach(model, gather={gather!r}, reduce={reduce!r}), "
            "in commands --parallel fsdp)"
        )
    known, both = list(names), re.split(r"[\W_]", name.lower(), maxsplit=1)
    if len(both) > 1 and {*both} <= {*known}:
        return f" (did you mean {'+'.join(both)!r}?)"
    return did_you_mean(name.lower(), known)


def whole_number(value: object, expected: str, *, least: int = 1, most: float = float("inf")) -> int:
    """`value` as an int, also if it is NumPy's. Raises ValueError, saying what was `expected`, where it is none in range.

    >>> whole_number(64, "every is a number of steps, at least 1")
    64
    """
    if not isinstance(value, Integral) or not least <= int(value) <= most:
        raise ValueError(f"{expected}; got {value!r}")
    return int(value)


def nearest_named(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: TypeError for an unknown keyword, naming the nearest."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                hint = did_you_mean(name, known)
                raise TypeError(f"{function.__name__} has no argument {name!r}{hint}; it has: {', '.join(known)}")
        return function(*args, **kwargs)

    return checked
