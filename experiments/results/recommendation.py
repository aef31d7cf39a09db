"""Whether compression pays in a comparison, in a sentence: the verdict that is shown."""

from __future__ import annotations

import dataclasses
import math

from .comparison import NO_LINK, SIMULATED, Results, RunResult
from .time_to_loss import SAME_LOSS, UNCOMPRESSED, reference, times_to_loss

WORTHWHILE = 1.1  # a speed-up below this is not worth a lossy method


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
    baseline = min(plain, key=lambda run: run.step_seconds["p50"])
    fastest = min(kept, key=lambda run: run.step_seconds["p50"], default=baseline)
    gain = baseline.step_seconds["p50"] / fastest.step_seconds["p50"]
    if fastest in plain or gain < WORTHWHILE:
        return (
            f"Do not compress further here: at the same held-out loss (within {SAME_LOSS:.0%}) no method makes a step "
            f"{WORTHWHILE:.1f}x as fast as {baseline.compressor}. {_where(results)}"
        )
    return (
        f"{fastest.compressor} makes a step {gain:.2f}x as fast as {baseline.compressor} and keeps the held-out loss "
        f"(within {SAME_LOSS:.0%}), over {results.runs[0].steps} steps.{_way(results, fastest)} {_where(results)}"
    )


def _way(results: Results, fastest: RunResult) -> str:
    """How much sooner the loss is reached, where it is."""
    usual = reference(results)
    times = {run.compressor: time for run, time in zip(results.runs, times_to_loss(results), strict=True)}
    if usual is None or (sooner := times[fastest.compressor]) is None or (later := times[usual.compressor]) is None:
        return ""
    return f" It reaches the loss of {usual.compressor} in {sooner:.1f} s instead of {later:.1f} s."


def _where(results: Results) -> str:
    network = results.environment.get("network")
    if network not in (None, NO_LINK):
        return f"Network: {network}."
    if results.environment.get("launched_by", "gradwire") != "gradwire":
        return "Steps and network are those of this run."
    return (
        "These ranks share one machine: start `gradwire compare` with torchrun on your hosts to measure your network."
    )
