"""Keywords of a call: a misspelt one is refused with the nearest that there is."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def nearest_named(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: TypeError for an unknown keyword, naming the nearest."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(known)}"
                raise TypeError(f"{function.__name__} has no argument {name!r}{hint}")
        return function(*args, **kwargs)

    return checked
