"""Notices error feedback that holds back ever more."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from ..memory.bucket_memory import BucketMemory

ADVICE = (
    "steps come late, and training may diverge. Damp what is held back (feedback=0.9, or less), begin with dense steps "
    "(start_iter=), lower the learning rate, or let guard=true do it when it is needed"
)


class Runaway:
    """Warns once, of the first bucket that it is found in."""

    def __init__(self) -> None:
        self._told = False

    def look(self, buckets: Iterable[tuple[tuple[str, ...], BucketMemory]]) -> None:
        """Between steps, as often as a sample is taken."""
        if self._told:
            return
        for names, bucket in buckets:
            gauge = bucket.gauge
            if gauge is not None and gauge.guard is None and gauge.runs_away:
                self._told = True
                warnings.warn(
                    f"compression of {names[0]} and others in its bucket holds back {gauge.residual_ratio:.0f} times a "
                    f"gradient, and what is sent has a cosine of {gauge.cosine:.2f} with what was meant: {ADVICE}",
                    stacklevel=2,
                )
                return
