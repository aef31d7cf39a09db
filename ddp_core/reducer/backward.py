"""The progress of one synchronized backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from ..measure.step import Step
from .unused_parameters import Usage


class Stage(Enum):
    """The stages of a synchronized backward, in order. Most steps begin with SENDING.

    `Reducer.start` ends EXPECTED, `_end` ends COUNTING, `_launch` ends SENDING, and `_finish` ends SENT.
    """

    EXPECTED = auto()  # forward has ended, and backward has to show first which parameters it will reach
    COUNTING = auto()  # the first step of a static graph: no bucket leaves before the last gradient
    SENDING = auto()  # a bucket leaves once all of its gradients are ready, and all buckets before it have left
    SENT = auto()  # all buckets have left
    AVERAGING = auto()  # backward has ended: averages are waited for, and handed out
    BROKEN = auto()  # an average did not come


@dataclass
class Backward:
    """The progress of one synchronized backward."""

    step: Step  # the record of it
    stage: Stage
    missing: list[int]  # by parameter, firings of its hook until its gradient is ready; below 0 there were too many
    asks: bool  # ranks tell each other which parameters they used
    leaves_out: bool  # a bucket that no rank used is not sent, or zeros stand for its old gradients
    usage: Usage | None  # the answer, or that of a static graph's first step; None where nobody asks, or not yet
    order: list[int] = field(default_factory=list)  # parameters as they got ready; those of all firings in COUNTING
    undefined: set[int] = field(default_factory=set)  # parameters whose hook fired with no gradient
    sent: int = 0  # of what `BucketAssignment.sending` lists
    why_broken: str = ""  # an error's text

    @property
    def under_way(self) -> bool:
        """True if other ranks may have received something of it."""
        asked = self.asks and self.usage is not None
        return bool(self.order or self.sent or asked or self.stage is Stage.BROKEN)

    def firings(self) -> list[int]:
        """Return how often each parameter fired in the first backward of a static graph, which now sends them all.

        The order keeps the last firings.
        """
        counted = [1 - missing for missing in self.missing]
        self.missing = [1] * len(counted)
        self.order = list(dict.fromkeys(reversed(self.order)))[::-1]
        return counted
