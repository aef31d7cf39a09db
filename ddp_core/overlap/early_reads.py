"""The line of the user's code that reads a parameter or a gradient and so makes a step wait before its next forward."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from types import FrameType

from ..averaging.step_checks import OURS

STEPS = 3  # in a row, until it is warned of


class EarlyReadWarning:
    """Notes who reads between a backward and the next forward, and tells once where every step is made to wait.

    `counts`: steps, by "file:line in function".
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._in_a_row, self._warned, self._this_step = 0, False, False

    def note(self) -> None:
        """Somebody reads now. Once a step counts."""
        if self._this_step:
            return
        self._this_step = True
        where = reader()
        self.counts[where] += 1
        self._in_a_row += 1
        if self._in_a_row == STEPS and not self._warned:
            self._warned = True
            warnings.warn(
                f"{where} reads parameters or gradients between backward and the next forward, which waits for their "
                "averages at every step: nothing overlaps there. Results are right. Clipping by norm and GradScaler have to "
                "wait; other code may read less often",
                stacklevel=3,
            )

    def next_step(self) -> None:
        """Another backward has ended."""
        if not self._this_step:
            self._in_a_row = 0
        self._this_step = False


def reader() -> str:
    """The innermost line that is neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    if frame is None:
        return "code outside of Python"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
