"""How long each method trains until it is where 16 bits would have brought it."""

from __future__ import annotations

from .comparison import Results, RunResult
from .statistics import seconds_to, smoothed

UNCOMPRESSED = ("bf16", "fp16", "none", "torch")  # what a user gets without giving anything up, the usual ones first
SAME_LOSS = 0.03  # relative difference in loss that counts as none


def reference(results: Results) -> RunResult | None:
    """The run whose last loss all others are to reach: of bf16, or the next uncompressed one; None where none is."""
    by_name = {run.compressor: run for run in results.runs if run.loss}
    return next((by_name[name] for name in UNCOMPRESSED if name in by_name), None)


def times_to_loss(results: Results) -> list[float | None]:
    """For each run the seconds of training until its smoothed loss is that of the reference at its end.

    `SAME_LOSS` above it is near enough. None for a run that never gets there.
    """
    wanted = reference(results)
    if wanted is None:
        return [None for _ in results.runs]
    target = smoothed(wanted.loss)[-1] * (1 + SAME_LOSS)
    return [seconds_to(target, run.loss, run.train_seconds) for run in results.runs]


def meaning(results: Results) -> str:
    """What the times to the loss are, in a sentence; nothing where there are none."""
    wanted = reference(results)
    return (
        f"Time to loss: seconds of training until the smoothed loss is within {SAME_LOSS:.0%} of what {wanted.compressor} "
        "ends with."
        if wanted
        else ""
    )
