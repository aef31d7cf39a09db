"""The candidates of `advise`, their expected losses, and the compressors that the tables of the pages name.

Expected losses are the worst of those that the tables show: of the largest model with which a compressor ran, of the
largest that has three seeds, of the largest that compressed from the first step, of the longest training, and with SGD of
each network.
`python docs/benchmarks/write_claims.py` writes them into the pages from the raw points; tests/test_claims.py compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

ADAMW, SGD, MUON = OPTIMIZERS = ("AdamW", "SGD with momentum", "Muon")
SEED = 0.6  # points: standard deviation over seeds of a compressor's distance to none, the median of study `quality`
MOST_SEED = 3.1  # points: and the largest
LARGER = 0.9  # points: the largest change of that distance from study `quality` to `quality-long`, both after a warm-up
LONGER = 3.2  # points: with Muon and powersgd:rank=8,payload=int8, from 120 to 400 steps of one model


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
    Candidate("int8", {ADAMW: 0.001, SGD: 0.0, MUON: 0.0}, HALF, any_size=True),
    Candidate(
        "int4",
        {ADAMW: 0.012, SGD: 0.008, MUON: 0.019},
        {ADAMW: 128e6, SGD: 0.31e6, MUON: 11e6},
        warm_up=(MUON,),
        any_size=True,
    ),
    Candidate("int4:core=4", {MUON: 0.008}, {MUON: 0.9e6}),
    Candidate("int2", {ADAMW: 0.002, SGD: 0.012, MUON: 0.022}, LARGER_MUON),
    Candidate("powersgd:rank=4", {ADAMW: 0.050, SGD: 0.020, MUON: 0.039}, SMALL),
    Candidate("powersgd:rank=8,payload=int8", {ADAMW: 0.009, SGD: 0.007, MUON: 0.053}, LOW_RANK, warm_up=(MUON,)),
    Candidate("topk:ratio=0.01,error_feedback=0.9", {ADAMW: 0.034, SGD: 0.060, MUON: 0.075}, LARGER_MUON),
    Candidate("onebit", {ADAMW: 0.072, SGD: 0.055, MUON: 0.044}, LARGER_MUON),
)
ANSWERED = ("bf16", "int8", "int4", "powersgd:rank=8,payload=int8")  # `compare` compares these


def uncertainty() -> str:
    """Return how much a compressor's distance to the loss of `none` tells, in two sentences."""
    return (
        f"In gradwire's studies of small GPTs, another seed changes a distance to none by {SEED} points (standard "
        f"deviation, median over compressors; at most {MOST_SEED}). With AdamW and after an uncompressed warm-up, a model "
        f"and a training 3x as large changed it by up to {LARGER} points; with Muon, 3.3x the steps alone by {LONGER}."
    )
