"""Calls that keep nobody alive: what a wrapper hands to others must not outlive it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any], otherwise: str | None = None) -> Callable[..., Any]:
    """A call of a bound method; once its object is gone, it does nothing, or raises RuntimeError with the text given."""
    me, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*arguments: Any) -> Any:
        if (owner := me()) is not None:
            return function(owner, *arguments)
        if otherwise is not None:
            raise RuntimeError(otherwise)
        return None

    return call
