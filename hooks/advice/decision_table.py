"""The decision table: which compressor, by network and optimizer, with its expected loss and speed-up.

The candidates of `advise`, its expected losses, and the tables in README and docs/choosing.md come from here alone.
`python docs/benchmarks/decision_table.py` writes those tables and computes the predictions again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ADAMW, SGD, MUON = OPTIMIZERS = ("AdamW", "SGD with momentum", "Muon")
MEASURED, PREDICTED = "measured", "predicted"
AS_ADAMW = "as AdamW"  # the source of a speed-up that is that of AdamW's cell: the bytes are the same
SEED = 0.5  # points: standard deviation over seeds of a compressor's distance to none, the median of study `quality`
LARGER = 0.9  # points: the largest change of that distance from study `quality` to `quality-long`


@dataclass(frozen=True)
class Candidate:
    """A compressor that `advise` may recommend.

    `losses`: by optimizer, how far the validation loss ends above that of `none`, as a part of it, if compression begins
    with the first step. `warm_up`: True if a warm-up lowered that loss in the study.
    """

    spec: str
    losses: Mapping[str, float] = field(default_factory=dict)
    warm_up: bool = False


@dataclass(frozen=True)
class Answer:
    """A cell of the table. `speed_up` is over `bf16`: of the time to a target loss if measured, else of a step.

    `source`: a row of the table of sources in docs/choosing.md. `local_loss`: of local SGD, which is no candidate.
    """

    network: str
    optimizer: str
    compressor: str
    speed_up: float
    kind: str
    source: str
    local_loss: float | None = None

    @property
    def expected_loss(self) -> float:
        """The expected excess of the validation loss over that of `none`, as a part of it."""
        if self.local_loss is not None:
            return self.local_loss
        return next(each.losses[self.optimizer] for each in CANDIDATES if each.spec == self.compressor)


CANDIDATES = (
    Candidate("none", {ADAMW: 0.0, SGD: 0.0, MUON: 0.0}),
    Candidate("bf16", {ADAMW: -0.002, SGD: 0.0, MUON: 0.0}),
    Candidate("int8", {ADAMW: 0.001, SGD: 0.0, MUON: 0.0}),
    Candidate("int4", {ADAMW: 0.002, SGD: 0.008, MUON: 0.019}, warm_up=True),
    Candidate("int2", {ADAMW: 0.006, SGD: 0.012, MUON: 0.022}, warm_up=True),
    Candidate("powersgd:rank=4", {ADAMW: 0.050, SGD: 0.020, MUON: 0.039}, warm_up=True),
    Candidate("powersgd:rank=8,payload=int8", {ADAMW: 0.028, SGD: 0.007, MUON: 0.053}, warm_up=True),
    Candidate("topk:ratio=0.01,feedback=0.9", {ADAMW: 0.034, SGD: 0.060, MUON: 0.075}),
    Candidate("onebit", {ADAMW: 0.072, SGD: 0.055, MUON: 0.044}, warm_up=True),
)

SLOW, GIGABIT, TEN, FAST = "100 Mbit/s Ethernet", "1 Gbit/s Ethernet", "10 Gbit/s Ethernet", "25 Gbit/s Ethernet"
BOX, SITES = "GPUs in one box without NVLink", "sites on the internet, 10 Mbit/s"
NETWORKS = (SLOW, GIGABIT, TEN, FAST, BOX, SITES)

ANSWERS = (
    Answer(SLOW, ADAMW, "powersgd:rank=8,payload=int8", 5.4, MEASURED, "GPT 19 M"),
    Answer(SLOW, SGD, "powersgd:rank=8,payload=int8", 19, PREDICTED, "ResNet-18"),
    Answer(SLOW, MUON, "int4", 2.8, PREDICTED, "GPT 19 M"),
    Answer(GIGABIT, ADAMW, "int4", 1.3, MEASURED, "GPT 19 M"),
    Answer(GIGABIT, SGD, "powersgd:rank=8,payload=int8", 4.2, PREDICTED, "ResNet-18"),
    Answer(GIGABIT, MUON, "int4", 1.3, PREDICTED, AS_ADAMW),
    Answer(TEN, ADAMW, "int4", 2.8, PREDICTED, "GPT 124 M"),
    Answer(TEN, SGD, "bf16", 1.0, PREDICTED, "ResNet-50"),
    Answer(TEN, MUON, "int4", 2.8, PREDICTED, AS_ADAMW),
    Answer(FAST, ADAMW, "int8", 1.3, PREDICTED, "GPT 124 M"),
    Answer(FAST, SGD, "bf16", 1.0, PREDICTED, "ResNet-50"),
    Answer(FAST, MUON, "int8", 1.3, PREDICTED, AS_ADAMW),
    Answer(BOX, ADAMW, "int4", 1.7, PREDICTED, "8 x A40"),
    Answer(BOX, SGD, "bf16", 1.0, PREDICTED, "8 x A40"),
    Answer(BOX, MUON, "int4", 1.7, PREDICTED, AS_ADAMW),
    Answer(SITES, ADAMW, "int4", 46, MEASURED, "LocalSteps", local_loss=-0.005),
    Answer(SITES, SGD, "int4", 46, PREDICTED, AS_ADAMW, local_loss=-0.005),
    Answer(SITES, MUON, "int4", 46, PREDICTED, AS_ADAMW, local_loss=-0.005),
)
ANSWERED = tuple(each.spec for each in CANDIDATES if any(each.spec == answer.compressor for answer in ANSWERS))


def uncertainty() -> str:
    """Return how much a compressor's distance to the loss of `none` tells, in two sentences."""
    return (
        f"In gradwire's studies of small GPTs, another seed changes a distance to none by {SEED} points (standard "
        f"deviation). A model and a training 3x as large change it by up to {LARGER} points."
    )
