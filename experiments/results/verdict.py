"""The verdict of a comparison: whether to compress here, and with what."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

from ..advice.candidates import uncertainty
from ..advice.rule import Rule, few, taken, wide
from .comparison import NO_LINK, SIMULATED, Results, RunResult
from .statistics import smoothed
from .time_to_loss import FEWEST_REPEATS, UNCOMPRESSED, TimeToLoss, digits, reference, times_to_loss
from .words import filled_in

NO_DIFFERENCE = "No difference measured."
ONE_SEED = "One seed cannot decide differences of less than 2 to 3%."
UNDECIDED = f"{ONE_SEED} --seeds 3 prints the interval that three leave."
SHARED_MEMORY = (
    "These CPU ranks share one host's memory. Run `gradwire compare` with torchrun on your hosts or GPUs: GPUs without "
    "NVLink often gain most."
)
AS_IT_IS = ("none", "torch")  # without gradwire
Timed: TypeAlias = tuple[RunResult, TimeToLoss]  # a run that reaches the loss, and when


def losses(results: Results) -> str:
    """Return the size of the runs, and how much their losses tell."""
    steps = max((run.steps for run in results.runs), default=0)
    return f"Losses: {results.model['parameters']:,} parameters, {steps:,} steps, one seed. {UNDECIDED} {uncertainty()}"


def filled(results: Results) -> str:
    """Return the compressors to which options were added, as a sentence; nothing if there are none."""
    return filled_in([(run.compressor, run.tuned) for run in results.runs], results.config.get("optimizer", ""))


def recommendation(results: Results) -> str:
    """Return the verdict by the rule of `advise`, from times to the loss: what to use, and the next step.

    A step of the rule counts where the quartiles of its repeats do not overlap those of the one before. The verdict is
    `NO_DIFFERENCE` alone where those of all overlap those of none. Runs that end within their warm-up are left out, and
    named.
    """
    cold = [run.compressor for run in results.runs if not run.warmed_up]
    verdict = _verdict(dataclasses.replace(results, runs=tuple(run for run in results.runs if run.warmed_up)))
    if not cold or verdict == NO_DIFFERENCE:
        return verdict
    whose = "its warm-up does" if len(cold) == 1 else "their warm-ups do"
    return f"{verdict} Left out: {', '.join(cold)}, as {whose} not end within the run."


def _verdict(results: Results) -> str:
    if results.environment.get("network") == SIMULATED:
        return "No verdict: simulated ranks have no network. Losses and bytes are those of real ranks."
    plain = [run for run in results.runs if run.compressor in UNCOMPRESSED]
    wanted = reference(results)
    if wanted is None or len(plain) == len(results.runs):
        return "No verdict: a verdict takes a run of none, bf16 or fp16 and one of another compressor."
    if not math.isfinite(smoothed(wanted.loss)[-1]):
        return f"No verdict: the loss of {wanted.compressor} is not finite, so no other run can reach it."
    times = zip(results.runs, times_to_loss(results), strict=True)
    timed = sorted(((run, time) for run, time in times if time), key=lambda each: each[1].seconds)
    if few := _too_few_repeats(results, timed):
        return few
    return _decided(results, timed, wanted)


def _too_few_repeats(results: Results, timed: list[Timed]) -> str:
    """Return why the times say nothing about differences; nothing where they do."""
    if any(run.turn_steps is None for run in results.runs):
        return "No verdict: the compressors trained one after the other, so the host may have changed its speed."
    repeats = min(len(time.repeats) for _, time in timed)
    if repeats >= FEWEST_REPEATS:
        return ""
    return (
        f"No verdict: {results.runs[0].steps} steps give {repeats} repeats of the time to the loss, and a verdict takes "
        f"{FEWEST_REPEATS}. Raise --steps."
    )


def _decided(results: Results, timed: list[Timed], wanted: RunResult) -> str:
    """Return the verdict where times can be told apart; `timed`: the soonest first."""
    plain = [each for each in timed if each[0].compressor in UNCOMPRESSED]
    others = [each for each in timed if each[0].compressor not in UNCOMPRESSED and _keeps_loss(each[0], results)]
    usual = next((each for each in plain if each[0].compressor in AS_IT_IS), plain[0])
    steps = [plain[0], *[each for each in others if wide(each[0].compressor)][:1], *others[:1]]
    ladder = _ladder(usual, steps)
    if len(ladder) == 1:
        return _stays(usual, [each for each in steps if each is not usual], results, wanted)
    taking = taken([run.compressor for run, _ in ladder[1:]], few=few(run.compressor for run in results.runs))
    if taking is None:
        told = f"Do not compress here: none of 8 bits or more is {Rule.worthwhile:.1f}x as fast as {_name(usual[0])}."
        return f"{told}{_next(usual[1], ladder[1], results)} {_where(results)}"
    place = 1 + taking
    (before, slower), (run, time), beyond = ladder[place - 1], ladder[place], ladder[place + 1 :][:1]
    alike = _alike(ladder[place], others, usual[1])
    between = " (no difference measured between them)" if len(alike) > 1 else ""
    told = (
        f"Use {' or '.join(alike)}{between}. {run.compressor} takes {digits(time.seconds)} s to the loss, and "
        f"{_name(before)} {digits(slower.seconds)} s: a speed-up of {slower.seconds / time.seconds:.2f}x. Its validation "
        f"loss is {_per_cent(_excess(run, results))}."
    )
    return "".join([told, *(_next(time, each, results) for each in beyond), f" {_where(results)}"])


def _next(time: TimeToLoss, beyond: Timed, results: Results) -> str:
    """Return the sentence about the next step, over what takes so long."""
    run, sooner = beyond
    return (
        f" Next step: {run.compressor} takes {digits(sooner.seconds)} s, {time.seconds / sooner.seconds:.2f}x faster, and "
        f"can cost loss; here {_per_cent(_excess(run, results))}."
    )


def _ladder(usual: Timed, steps: list[Timed]) -> list[Timed]:
    """Return `usual` and the steps that are worth it, each over the one before by a measured difference."""
    ladder = [usual]
    for run, time in steps:
        before = ladder[-1][1]
        if before.seconds >= Rule.worthwhile * time.seconds and time.differs_from(before):
            ladder.append((run, time))
    return ladder


def _stays(usual: Timed, steps: list[Timed], results: Results, wanted: RunResult) -> str:
    """Return the verdict where no step is worth it."""
    (run, time), more = usual, "" if usual[0].compressor in AS_IT_IS else " further"
    told = f"Do not compress{more} here:"
    if all(each.compressor in UNCOMPRESSED for each, _ in steps):
        return (
            f"{told} no other compressor reaches the training loss of {wanted.compressor} and keeps the validation loss (at "
            f"most {Rule.tolerance:.0%} above). {_where(results)}"
        )
    if not any(each.differs_from(time) for _, each in steps):
        return NO_DIFFERENCE
    fastest, soonest = min(steps, key=lambda each: each[1].seconds)
    why = f" A compressor must be {Rule.worthwhile:.1f}x faster." if soonest.seconds < time.seconds else ""
    return (
        f"{told} {_name(run)} takes {digits(time.seconds)} s to the loss, and {fastest.compressor}, the fastest other "
        f"compressor, {digits(soonest.seconds)} s.{why} {_where(results)}"
    )


def _alike(best: Timed, others: list[Timed], usual: TimeToLoss) -> list[str]:
    """Return the compressors whose times cannot be told from the best one's, with as many bits."""
    (run, time), bits = best, wide(best[0].compressor)
    if run.compressor in UNCOMPRESSED:
        return [run.compressor]
    return [
        each.compressor
        for each, its in others
        if wide(each.compressor) >= bits and not its.differs_from(time) and its.differs_from(usual)
    ]


def _name(run: RunResult) -> str:
    """Return a name that a sentence can begin with."""
    return "uncompressed training" if run.compressor == "none" else run.compressor


def _keeps_loss(run: RunResult, results: Results) -> bool:
    """Return True if the validation loss is at most `Rule.tolerance` above the best one that gives nothing up."""
    return _excess(run, results) <= Rule.tolerance


def _excess(run: RunResult, results: Results) -> float:
    """Return how far the validation loss is above the best one that gives nothing up, as a part of it."""
    plain = [each.eval.loss for each in results.runs if each.compressor in UNCOMPRESSED]
    return run.eval.loss / min(filter(math.isfinite, plain), default=math.nan) - 1


def _per_cent(part: float) -> str:
    """Return a part in per cent; never as -0.0 %."""
    return f"{round(part, 3) + 0.0:+.1%}"


def _where(results: Results) -> str:
    network, launcher = (results.environment.get(name) for name in ("network", "launched_by"))
    if network not in (None, NO_LINK):
        return f"Network: {network}."
    if launcher not in (None, "gradwire"):
        return "This holds for the hosts and the network of this run."
    return "This holds for the GPUs of this host." if results.environment.get("device") == "cuda" else SHARED_MEMORY
