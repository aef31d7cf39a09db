"""Gradients of which nothing tells: when they come is seen when others do, and that they come again by their versions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter

from torch import Tensor

VERSION = attrgetter("_version")  # of a tensor: how often it was changed in place


class Unheard:
    """The members of a bucket without hooks. `places`: theirs in the bucket.

    Once their gradients have been copied, what these have become must not change before the average is handed out: another
    gradient of the same parameter would be lost.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self._members = members
        self._asleep: Collection[int] = ()
        self.places: list[int] = []
        self.forget()

    def expect(self, asleep: Collection[int]) -> None:
        """In the step that begins these have no hooks, by their indices in the model."""
        self.forget()
        if asleep is not self._asleep:
            self._asleep = asleep
            self.places = [place for place, member in enumerate(self._members) if member in asleep]

    def forget(self) -> None:
        """None has been copied, or what becomes of them does not matter any more."""
        self._left: Sequence[int] = ()
        self._became: list[Tensor] = []
        self._versions: list[int] = []

    def leave(self, copied: Sequence[int], became: Sequence[Tensor | None]) -> None:
        """The gradients at these places have been copied; `became`: by place, where another one would be added."""
        self._left = sorted({*self.places}.intersection(copied))
        self._became = [tensor for place in self._left if (tensor := became[place]) is not None]
        self._versions = list(map(VERSION, self._became))

    def disturbed(self, *, alone: bool) -> int | None:
        """A member that got another gradient, by its index in the model, if there is one.

        One that shares its memory with others, as parts of one tensor do, counts all changes there: it is not asked, unless
        each counts `alone`.
        """
        now = list(map(VERSION, self._became))
        if now == self._versions:
            return None
        for place, tensor, version, before in zip(self._left, self._became, now, self._versions, strict=True):
            if version != before and (alone or tensor.untyped_storage().nbytes() == tensor.nbytes):
                return self._members[place]
        return None
