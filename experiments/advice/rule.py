"""The choices of a training, and the rule that takes one of them and names the next step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from .candidates import BACKWARD, PRIORITY, TWO_LEVELS, UNCOMPRESSED, Candidate
from .predict import Prediction

K = TypeVar("K")
TIE = 0.03  # of a step: what is nearer than that is as fast
WIDE = ("none", "bf16", "fp16", "int8")  # 8 bits or more of each number: no study saw a loss with any optimizer


@dataclass(frozen=True)
class Choice:
    """A compressor in an order of sending, with its step time and its expected loss.

    Attributes:
        candidate: the compressor, as `advise` lists it.
        order: the order of sending.
        prediction: the predicted step.
        loss: the expected loss above that of `none`, as a fraction; None if no model this large ran.
        memory: bytes of the compressor on a rank between steps, and at most.
        tried: measured seconds of a step of a copy; None if the compressor was not tried.
    """

    candidate: Candidate
    order: str
    prediction: Prediction
    loss: float | None
    memory: tuple[int, int] = (0, 0)
    tried: float | None = None

    @property
    def spec(self) -> str:
        """The compressor."""
        return self.candidate.spec

    @property
    def step(self) -> float:
        """Seconds of a step, measured if the compressor was tried, else predicted."""
        return self.prediction.step if self.tried is None else self.tried

    @property
    def free(self) -> bool:
        """True if the compressor gives nothing up."""
        return self.spec.removeprefix(TWO_LEVELS) in UNCOMPRESSED

    @property
    def is_none(self) -> bool:
        """True if this is what DistributedDataParallel does by itself."""
        return (self.spec, self.order) == ("none", BACKWARD)

    @property
    def name(self) -> str:
        """In words."""
        return self.spec if self.order == BACKWARD else f"{self.spec}, by priority"

    @property
    def line(self) -> str:
        """The line of code to paste."""
        spec = self.spec
        if self.order == PRIORITY:
            return (
                f'ddp_model = gradwire.DistributedDataParallel(model, compressor="{spec}", optimizer=optimizer)\n'
                "optimizer = gradwire.overlap(ddp_model, optimizer)  # gains nothing if you clip gradients by norm"
            )
        if spec == "none":
            return "ddp_model = torch.nn.parallel.DistributedDataParallel(model)"
        return f'handle = gradwire.attach(ddp_model, "{spec}", optimizer=optimizer)'


@dataclass(frozen=True)
class Rule:
    """The rule of recommendation, in the order of expected losses up to `tolerance` above none's, 8 bits or more first.

    With `wide_only`, as for Muon, compressors of 8 bits or more alone. A compressor is worth it if it makes a step
    `worthwhile` times as fast as the one before it that was worth it, the first as none does. Of these the one to take is
    `taken`, else none, and the one behind it the next step. `few`: no compressor of 8 bits or more is offered.
    """

    tolerance: float = 0.03
    worthwhile: float = 1.1
    wide_only: bool = False
    few: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance is a part of the loss, at least 0, such as 0.03; got {self.tolerance}")
        if not 1 <= self.worthwhile < math.inf:
            raise ValueError(f"worthwhile is a speed-up of at least 1, such as 1.1; got {self.worthwhile}")

    def chosen(self, choices: Sequence[Choice]) -> tuple[Choice, Choice | None]:
        """Return the recommended choice, which is none if no other is worth it, and the next step."""
        none, *worth = self.ladder(choices)
        place = taken([each.spec for each in worth], few=self.few)
        best, beyond = (none, worth) if place is None else (worth[place], worth[place + 1 :])
        return best, next(iter(beyond), None)

    def ladder(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return none and the choices that are worth it, one over the other.

        Of those with one loss, in whole per cents, only the fastest may be; of those as fast, the simplest.
        """
        none = next(each for each in choices if each.is_none)
        lossy = sorted((each for each in self.kept(choices) if not each.free), key=_rung)
        steps = [self.plain(choices), *(_first(list(group)) for _, group in groupby(lossy, _rung))]
        worth = self.worth({place: none.step / each.step for place, each in enumerate(steps)})
        return [none, *(steps[place] for place in worth)]

    def worth(self, speed_ups: Mapping[K, float]) -> list[K]:
        """Return the compressors that are worth it, of their speed-ups over none in the order of losses.

        >>> Rule().worth({"bf16": 1.5, "int8": 1.6, "int4": 1.7}), Rule().worth({"bf16": 1.05, "int8": 1.12})
        (['bf16', 'int4'], ['int8'])
        """
        found: list[K] = []
        for spec, faster in speed_ups.items():
            if faster >= self.worthwhile * (speed_ups[found[-1]] if found else 1.0):
                found.append(spec)
        return found

    def kept(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return the choices whose expected loss is within the tolerance, of as many bits as may be."""
        studied = (choice for choice in choices if choice.loss is not None and choice.loss <= self.tolerance)
        return [choice for choice in studied if wide(choice.spec) or not self.wide_only]

    def plain(self, choices: Sequence[Choice]) -> Choice:
        """The best of those that give nothing up."""
        return _first([choice for choice in choices if choice.free])


def wide(spec: str) -> bool:
    """Return True if a compressor, or both of FSDP2, send 8 bits or more of each number."""
    return all(each.rpartition("+")[2].partition(":")[0] in WIDE for each in spec.split("/"))


def few(offered: Iterable[str]) -> bool:
    """Return True if no compressor of 8 bits or more is offered: then one of fewer may be taken."""
    return not any(wide(spec) for spec in offered if spec not in ("none", "torch"))


def taken(worth: Sequence[str], *, few: bool) -> int | None:
    """Return the place of the compressor to take, of those that are worth it; None if there is none to take.

    It is the last of 8 bits or more. If `few`, it is else the first.

    >>> taken(["bf16", "int8", "int4"], few=False), taken(["int4"], few=False), taken(["int4"], few=True)
    (1, None, 0)
    """
    return max((place for place, spec in enumerate(worth) if wide(spec)), default=0 if few and worth else None)


def _rung(choice: Choice) -> tuple[bool, float]:
    """Return the place of a choice in the order of losses."""
    return not wide(choice.spec), _whole_loss(choice)


def _whole_loss(choice: Choice) -> float:
    """Return the expected loss in whole per cents, the studies' resolution."""
    return round(max(choice.loss or 0.0, 0.0), 2)


def _first(choices: Sequence[Choice]) -> Choice:
    """Return the best of the choices as fast as the fastest."""
    fastest = min(choice.step for choice in choices)
    near = [choice for choice in choices if choice.step <= fastest * (1 + TIE)]
    return min(near, key=lambda each: (_whole_loss(each), each.order != BACKWARD, each.step))


LEAST = f"{1 - 1 / Rule.worthwhile:.0%}".replace("%", " %")  # of a step
