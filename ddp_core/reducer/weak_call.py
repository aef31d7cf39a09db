"""Calls that keep nobody alive: what a wrapper hands to others must not outlive it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weak_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a bound method; once its object is gone, it does nothing."""
    me, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*arguments: Any) -> Any:
        return None if (owner := me()) is None else function(owner, *arguments)

    return call
