"""Calls that keep nobody alive: what a wrapper hands to others must not outlive it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any], otherwise: str | None = None) -> Callable[..., Any]:
    """A call of a bound method; once its object is gone, it does nothing, or raises RuntimeError with the text given."""
    me = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        if (bound := me()) is not None:
            return bound(*arguments)
        if otherwise is not None:
            raise RuntimeError(otherwise)
        return None

    return call
