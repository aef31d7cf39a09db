"""Remarks of a watch beside its numbers: once a compressor, where several reports in a row agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

IN_A_ROW = 3  # reports that agree
MARGIN = 0.95  # of the measured step: a dense one that is predicted to be shorter is worth a word
EARLY = 128  # steps whose gradients point one way: residuals are large by rights
HELD = 0.7  # of the gradient: a residual as large as in trainings that were late


class Adviser:
    """Reads the numbers of one report after the other."""

    def __init__(self) -> None:
        self._agree: Counter[tuple[str, str]] = Counter()

    def advice(self, what: str, found: Mapping[str, float]) -> str | None:
        """Return the remarks that are due about the compressor `what`, by a report's numbers."""
        said = []
        for remark in (slower, late):
            key, text = (what, remark.__name__), remark(what, found)
            if self._agree[key] < IN_A_ROW:
                self._agree[key] = self._agree[key] + 1 if text else 0
                said += [text] if text and self._agree[key] == IN_A_ROW else []
        return "\n".join(said) or None


def slower(what: str, found: Mapping[str, float]) -> str | None:
    """Say that steps without compression would be faster, by a replay."""
    now, dense = found.get("step_seconds", 0.0), found.get("dense_step_seconds", math.inf)
    if dense >= MARGIN * now:
        return None
    return (
        f"an uncompressed step would be faster now: about {dense * 1e3:.1f} ms, by a replay of the last steps, against "
        f"{now * 1e3:.1f} ms with {what}. By handle.swap, try 'none' on all ranks, or a compressor with less arithmetic"
    )


def late(what: str, found: Mapping[str, float]) -> str | None:
    """Say that PowerSGD's residual is as large as in trainings that were late (docs/results/powersgd-delay)."""
    ratio = found.get("residual_ratio", 0.0)
    if "powersgd" not in what or not ratio >= HELD or found["steps"] <= EARLY:
        return None
    return (
        f"the residual of {what} is {ratio:.1f}x the gradient. With Adam, PowerSGD at 0.7x to 2x ended 11 to 40 % of the "
        "steps behind uncompressed training: compare validation losses, and if it is late, take a higher rank or more bits"
    )
