"""The recommendation of `gradwire plan`: whether to compress, with what, and the lines to paste."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .advice.candidates import ADAMW, CANDIDATES, SGD
from .advice.predict import Prediction
from .advice.recommendation import LAUNCH, MEGA
from .advice.rule import LEAST, Rule, taken, wide
from .plan_config import OF_DDP, OF_HOSTS, PlanConfig

SHORTEST, LONGEST = 1e-4, 3600.0  # seconds of a step's computation that the search for the longest one looks at


@dataclass(frozen=True)
class Advice:
    """The recommendation for the hosts of a plan, as the page on choosing has it.

    `steps`: predicts a step without gradwire, then with each compressor.
    """

    config: PlanConfig
    steps: Callable[[PlanConfig], Sequence[Prediction]]

    @property
    def text(self) -> str:
        """The sentences, and the lines behind them."""
        several, whole = self.config.hosts > 1, self.of_ddp
        optimizer = "[muon, adamw]" if self.config.optimizer == "muon" else "optimizer"
        told = []
        if self.chosen and self.config.parallel == "fsdp":
            gather, reduce = self.chosen.split("/")
            told.append(f'handle = gradwire.attach(model, gather="{gather}", reduce="{reduce}", optimizer={optimizer})')
        if whole.chosen and (self.config.parallel == "ddp" or self.config.optimizer == "muon"):
            line = f'handle = gradwire.attach(ddp_model, "{whole.chosen}", optimizer={optimizer})'
            in_place = "  # in its place, with DDP, if the model fits on a rank"
            told.append(line + in_place * (self.config.parallel == "fsdp"))
        if whole.chosen and self.config.beside_ddp and self.config.optimizer != "muon":
            inner = whole.chosen.removeprefix("hosts+")
            line = f'handle = gradwire.attach(model, replicas="{inner}", optimizer={optimizer})'
            told.append(f"{line}  # in its place, with hybrid sharding")
        if not told:
            return self._words
        launch = LAUNCH if several else "torchrun --nproc-per-node {per_host} train.py"
        told.append(launch.format(hosts=self.config.hosts, per_host=self.config.cluster.gpus_per_host))
        with_ddp = " with DDP" * (self.chosen is None and "ddp_model" in told[0])
        runs = f"Each host runs this{with_ddp}; HOST is the first" if several else f"Run this{with_ddp}"
        runs += "; on GPUs with torch 2.15 or later, put TORCH_DIST_USE_NCCL2=0 before it"
        return "\n    ".join([f"{self._words} {runs}:", *told])

    @property
    def of_ddp(self) -> Advice:
        """The advice for the same hosts with DDP."""
        return replace(self, config=with_ddp(self.config))

    @cached_property
    def pairs(self) -> list[str]:
        """The compressors to choose from, in the order of bytes: with Muon, fewer than 8 bits cost loss."""
        first, then = simplest(self.config, self.steps)
        found = dict.fromkeys((first, then, then.replace("int8", "int4")))
        kept = [each for each in found if not (each.endswith("int4") and self.config.optimizer == "muon")]
        if self.config.parallel == "ddp":
            return kept
        return [f"{each.replace('int4', 'int8')}/{each}" for each in kept]

    @property
    def chosen(self) -> str | None:
        """The compressor to take; None if none saves enough of a step."""
        return self.worth[taken(self.worth)] if self.worth else None

    @cached_property
    def worth(self) -> list[str]:
        """The compressors that save enough of a step; without a network's rate, all of them."""
        return Rule().worth(self.faster or self._faster(SHORTEST)) if self.config.timed else self.pairs

    @cached_property
    def faster(self) -> dict[str, float]:
        """By how much each compressor makes a step faster; empty without a step's seconds."""
        return {} if self.config.step_seconds is None else self._faster(self.config.step_seconds)

    def _faster(self, seconds: float) -> dict[str, float]:
        before, *steps = self.steps(replace(self.config, compressors=self.pairs, step_seconds=seconds))
        return {spec: before.step / each.step for spec, each in zip(self.pairs, steps, strict=True)}

    @property
    def _words(self) -> str:
        if self.chosen is None:
            faster = self.faster or self._faster(SHORTEST)
            best = max(faster, key=faster.__getitem__)
            where = "" if self.config.parallel == "ddp" else "With FSDP2: "
            words = f"{where}Do not compress: {_named(best)} saves less than {LEAST} of a step ({faster[best]:.2f}x)."
            words += self._until
            return words + (" If the model fits on a rank, take DDP." if self.config.parallel == "fsdp" else "")
        words = f"Take {_named(self.chosen)}{self._cost(self.chosen)}.{self._until}"
        beyond = self.pairs[self.pairs.index(self.chosen) + 1 :]
        if less := [_named(each) for each in beyond if each not in self.worth]:
            words += f" {' and '.join(less)} would save less than {LEAST} of its step."
        words += "".join(f" Next step: {_named(each)}{self._cost(each)}." for each in beyond if each in self.worth)
        return words + " Stop there: with Muon, 4 bits cost loss." * (self.config.optimizer == "muon")

    def _cost(self, spec: str) -> str:
        """The clause for fewer than 8 bits: the time that they save over the compressor to take, and the cost in loss."""
        if wide(spec):
            return ""
        (candidate,) = (each for each in CANDIDATES if each.spec == "int4")
        kind = SGD if self.config.optimizer == "sgd" else ADAMW
        saves = ""
        if self.faster and spec != self.chosen:
            saves = f"saves {1 - self.faster[self.chosen or spec] / self.faster[spec]:.0%} of its step and "
        loss = (
            f"{candidate.losses[kind]:+.1%} with {kind}, measured with at most {candidate.largest[kind] / MEGA:.3g} M"
        )
        return f", which {saves}can cost loss ({loss} parameters)".replace("%", " %")

    @property
    def _until(self) -> str:
        """Up to which computation of a step one of the compressors pays; nothing without a network's rate."""
        if not (self.config.timed and self._pays(SHORTEST)):
            return ""
        if self._pays(LONGEST):
            return " Compression pays even if a step computes for an hour."
        low, high = math.log(SHORTEST), math.log(LONGEST)
        while high - low > 0.05:
            middle = (low + high) / 2
            low, high = (middle, high) if self._pays(math.exp(middle)) else (low, middle)
        return f" Compression pays while a step computes for less than about {float(f'{math.exp(low):.2g}'):,g} s."

    def _pays(self, seconds: float) -> bool:
        return bool(Rule().worth(self._faster(seconds)))


def _named(spec: str) -> str:
    gather, _, reduce = spec.partition("/")
    return f'"{gather}"' if reduce in ("", gather) else f'gather="{gather}", reduce="{reduce}"'


def with_ddp(config: PlanConfig) -> PlanConfig:
    """Return the plan of the same hosts with DDP."""
    return replace(config, parallel="ddp", compressors=list(OF_DDP), dtype=config.dtype.split("/")[-1])


def simplest(config: PlanConfig, steps: Callable[[PlanConfig], Sequence[Prediction]]) -> Sequence[str]:
    """Return the first two compressors to choose from. `bf16` saves nothing of gradients in 16 bits.

    Exact sums inside a host come first where ranks share its card, unless they take longer on the bus than they save.
    """
    first = 0 if config.policy.reduce_dtype == torch.float32 else 1
    families = [each[first : first + 2] for each in (OF_HOSTS, OF_DDP[1:])]
    if not config.shared_card or config.bus is None:
        return families[0 if config.shared_card else 1]
    _, *found = steps(replace(config, compressors=[*families[0], *families[1]]))
    of_hosts, others = (min(each.step for each in both) for both in (found[:2], found[2:]))
    return families[0 if of_hosts < others else 1]
