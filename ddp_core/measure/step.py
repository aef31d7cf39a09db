"""How far the step is whose buckets a handle is given."""

from __future__ import annotations


class Step:
    """What a handle knows of the step that is under way.

    Our own DDP says when one begins and when it ends. Of torch's, the indices of buckets tell: they rise within a step,
    and the last bucket says so, unless any may be the last.
    """

    def __init__(self) -> None:
        self._under_way = False
        self._all_sent = False  # as far as a hook can tell; that the averages arrive is not known to it
        self._last_index: int | None = None
        self._any_last = False

    def expect(self, *, any_last: bool) -> None:
        """The next bucket is the first of a step, whatever its index; `any_last`: each one may be the last."""
        self._last_index, self._any_last = None, any_last

    def begins_with(self, index: int) -> bool:
        """Whether the bucket of this index is the first of a step."""
        return self._last_index is None or index <= self._last_index

    def begin(self) -> None:
        """Its first bucket comes next."""
        self._under_way, self._all_sent = True, False

    def sent(self, index: int, *, last: bool) -> None:
        """A hook has sent a bucket."""
        self._last_index, self._all_sent = index, last or self._any_last

    def end(self) -> None:
        """Its averages have been handed out, or what it did no longer matters."""
        self._under_way = False

    def is_torn(self, *, failed: bool) -> bool:
        """Whether some of its buckets never came to their end. `failed`: whether one that was sent did not."""
        return self._under_way and (failed or not self._all_sent)
