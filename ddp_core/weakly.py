"""Calls that keep nobody alive: what a wrapper hands to others must not outlive it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a bound method; once its object is gone, it does nothing."""
    me = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = me()
        return None if bound is None else bound(*arguments)

    return call
