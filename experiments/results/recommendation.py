"""Whether compression pays in a comparison, in a sentence: the verdict that is shown."""

from __future__ import annotations

import dataclasses
import math

from .comparison import SIMULATED, Results

UNCOMPRESSED = ("none", "bf16", "fp16")  # what a user gets without giving anything up
WORTHWHILE = 1.1  # a speed-up below this is not worth a lossy method
SAME_LOSS = 0.03  # relative difference in held-out loss that counts as none


def recommendation(results: Results) -> str:
    """Whether compression pays here, by step time at the same held-out loss, against the fastest uncompressed run.

    Runs that were warming up to their end are left out, and named.
    """
    cold = [run.compressor for run in results.runs if not run.warmed_up]
    told = _recommendation(dataclasses.replace(results, runs=tuple(run for run in results.runs if run.warmed_up)))
    if not cold:
        return told
    whose = "its warm-up does" if len(cold) == 1 else "their warm-ups do"
    return f"{told} Left out: {', '.join(cold)}, as {whose} not end within the run."


def _recommendation(results: Results) -> str:
    if results.environment.get("network") == SIMULATED:
        return "No verdict: simulated ranks have no network. Losses and bytes are those of real ranks."
    plain = [run for run in results.runs if run.compressor in UNCOMPRESSED]
    if not plain or len(plain) == len(results.runs):
        return "No verdict: it takes a run of none, bf16 or fp16 and one of another compressor."
    best_loss = min((run.eval.loss for run in plain if math.isfinite(run.eval.loss)), default=math.nan)
    kept = [run for run in results.runs if run.eval.loss <= best_loss * (1 + SAME_LOSS)]
    reference = min(plain, key=lambda run: run.step_seconds["p50"])
    fastest = min(kept, key=lambda run: run.step_seconds["p50"], default=reference)
    gain = reference.step_seconds["p50"] / fastest.step_seconds["p50"]
    if fastest in plain or gain < WORTHWHILE:
        return (
            f"Do not compress further here: at the same held-out loss (within {SAME_LOSS:.0%}) no method makes a step "
            f"{WORTHWHILE:.1f}x as fast as {reference.compressor}. {_where(results)}"
        )
    return (
        f"{fastest.compressor} makes a step {gain:.2f}x as fast as {reference.compressor} and keeps the held-out loss "
        f"(within {SAME_LOSS:.0%}), over {results.runs[0].steps} steps. {_where(results)}"
    )


def _where(results: Results) -> str:
    if network := results.environment.get("network"):
        return f"Network: {network}."
    if results.environment.get("launched_by", "gradwire") != "gradwire":
        return "Steps and network are those of this run."
    return (
        "These ranks share one machine: start `gradwire compare` with torchrun on your hosts to measure your network."
    )
