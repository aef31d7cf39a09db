"""A name that a user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint to put behind an unknown name; nothing where none of `names` is near.

    >>> did_you_mean("resnet5", ["mlp", "resnet50"]), did_you_mean("x", ["mlp"])
    (" (did you mean 'resnet50'?)", '')
    """
    near = get_close_matches(name, list(names), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
