"""Scattered parts of a flat buffer, taken out and put back together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

Place: TypeAlias = tuple[int, int]  # first element, elements


def joined(places: Iterable[Place]) -> tuple[Place, ...]:
    """The same elements in the same order, in as few places as can be.

    >>> joined([(0, 3), (3, 2), (7, 1)])
    ((0, 5), (7, 1))
    """
    found: list[Place] = []
    for first, size in places:
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((first, size))
    return tuple(found)


def pieces(flat: Tensor, places: Iterable[Place]) -> list[Tensor]:
    """Views of the elements at each place."""
    return [flat[first : first + size] for first, size in places]


def put_back(flat: Tensor, parts: list[Tensor]) -> None:
    """Copy consecutive pieces of `flat` into `parts`."""
    torch._foreach_copy_(parts, list(flat.split([part.numel() for part in parts])))
