"""Keywords of a call: a misspelt one is refused with the nearest that there is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..compress.builder.options import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


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
