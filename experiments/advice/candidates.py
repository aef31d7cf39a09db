"""The compressors that `advise` considers, and the expected loss of each.

Expected losses are the worst of those that the tables show: of the largest model with which a compressor ran, of the
largest that has three seeds, of the largest that compressed from the first step, of the largest with 1,000 steps or more,
and with SGD of each network.
`python docs/benchmarks/write_claims.py` writes them into the pages from the raw points; tests/test_claims.py compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...compress import compressor
from ...compress.builder.optimizer_defaults import Optimizers, kinds, tuned_specification

UNCOMPRESSED = ("none", "bf16")  # what a user gets without giving anything up
PRIORITY, BACKWARD = "priority", "backward"
TWO_LEVELS = "hosts+"
NARROW = "residual_bits=8"
ADAMW, SGD, MUON = OPTIMIZERS = ("AdamW", "SGD with momentum", "Muon")
SEED = 0.6  # points: standard deviation over seeds of a compressor's distance to none, the median of study `quality`
MOST_SEED = 3.1  # points: and the largest
LARGER = 0.9  # points: the largest change of that distance from study `quality` to `quality-long`, both after a warm-up
LONGER = 3.4  # points: with Muon and powersgd:rank=8,payload=int8, from 120 to 400 steps of one model


@dataclass(frozen=True)
class Candidate:
    """A compressor that `advise` may recommend.

    `losses`: by optimizer, how far the validation loss ends above that of `none`, as a part of it. `largest`: by
    optimizer, the parameters of the largest model that ran. `any_size`: the loss is expected of larger models, too;
    `advise` prints `largest` beside it. `warm_up`: the optimizers with which a warm-up lowered the loss, on each of 3 seeds.
    """

    spec: str
    losses: Mapping[str, float] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=dict)
    warm_up: tuple[str, ...] = ()
    any_size: bool = False

    def expected_loss(self, optimizer: str, parameters: int) -> float | None:
        """Return the expected loss above that of `none` as a part of it; None where nobody measured it."""
        if parameters > self.largest.get(optimizer, math.inf) and not self.any_size:
            return None
        return self.losses.get(optimizer)


SMALL = {ADAMW: 0.14e6, SGD: 0.1e6, MUON: 0.14e6}  # parameters
LARGER_MUON = SMALL | {MUON: 2.5e6}
LOW_RANK = {ADAMW: 19.2e6, SGD: 0.31e6, MUON: 2.5e6}  # a rank of 32 ended 27 % above with 128 M
HALF = SMALL | {ADAMW: 19.2e6, MUON: 0.9e6}
CANDIDATES = (
    Candidate("none", {ADAMW: 0.0, SGD: 0.0, MUON: 0.0}),
    Candidate("bf16", {ADAMW: -0.002, SGD: 0.0, MUON: 0.0}, HALF, any_size=True),
    Candidate("int8", {ADAMW: 0.001, SGD: 0.0, MUON: 0.002}, HALF, any_size=True),
    Candidate(
        "int4",
        {ADAMW: 0.012, SGD: 0.008, MUON: 0.019},
        {ADAMW: 128e6, SGD: 0.31e6, MUON: 11e6},
        warm_up=(MUON,),
        any_size=True,
    ),
    Candidate("int4:core=4", {ADAMW: 0.012, MUON: 0.008}, {ADAMW: 0.14e6, MUON: 0.9e6}),
    Candidate("int2", {ADAMW: 0.010, SGD: 0.012, MUON: 0.072}, LARGER_MUON),
    Candidate("powersgd:rank=4", {ADAMW: 0.050, SGD: 0.020, MUON: 0.039}, SMALL),
    Candidate("powersgd:rank=8,payload=int8", {ADAMW: 0.009, SGD: 0.007, MUON: 0.055}, LOW_RANK, warm_up=(MUON,)),
    Candidate("topk:ratio=0.01,error_feedback=0.9", {ADAMW: 0.034, SGD: 0.060, MUON: 0.075}, LARGER_MUON),
    Candidate("onebit", {ADAMW: 0.072, SGD: 0.055, MUON: 0.044}, LARGER_MUON),
)
ANSWERED = ("bf16", "int8", "int4", "powersgd:rank=8,payload=int8")  # `compare` compares these


def family(optimizer: Optimizers) -> str:
    """Return the optimizer of `CANDIDATES` that is most like this one, or these."""
    found = kinds(optimizer)
    if "Muon" in found:
        return MUON
    return ADAMW if found == {"Adam"} else SGD


def candidates(specs: Sequence[str] | None, optimizer: Optimizers | None = None) -> list[Candidate]:
    """Return the candidates of some compressors, "none" always among them.

    If none are given, those of the table, but for what never ran with the optimizer. Each has the options that `attach`
    fills in for it. A two-level compressor loses what its inner one does.
    """
    known = {tuned_specification(each.spec, optimizer): each for each in CANDIDATES}
    ran = [spec for spec, each in known.items() if optimizer is None or family(optimizer) in each.losses]
    names = ran if specs is None else dict.fromkeys(tuned_specification(spec, optimizer) for spec in ["none", *specs])
    return [replace(known.get(spec, Candidate(spec)), spec=spec) for spec in names]


def narrowed(candidate: Candidate) -> Candidate | None:
    """Return a candidate with its residual in 8 bits; None if it has no residual, or says itself in how many bits.

    It is expected to lose as much: three seeds of int4 show no difference of narrow residuals (0.14 M parameters).
    """
    spec = candidate.spec
    narrow = f"{spec},{NARROW}" if ":" in spec.rpartition("+")[2] else f"{spec}:{NARROW}"
    try:
        compressor(narrow)
    except ValueError:
        return None
    return replace(candidate, spec=narrow, largest={each: SMALL[each] for each in candidate.largest})


def uncertainty() -> str:
    """Return how much a compressor's distance to the loss of `none` tells, in two sentences."""
    return (
        f"In gradwire's studies of small GPTs, another seed changes a distance to none by {SEED} points (standard "
        f"deviation, median over compressors; at most {MOST_SEED}). With AdamW and after an uncompressed warm-up, a model "
        f"and a training 3x as large changed it by up to {LARGER} points; with Muon, 3.3x the steps alone by {LONGER}."
    )
