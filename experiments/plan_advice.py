"""The recommendation of `gradwire plan`: whether to compress, with what, and the lines to paste."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from rich.filesize import decimal

from .advice.candidates import ADAMW, CANDIDATES, MUON, SGD, TWO_LEVELS
from .advice.predict import Prediction
from .advice.recommendation import LAUNCH, MEGA
from .advice.rule import LEAST, Rule, taken, wide
from .plan_config import OF_DDP, OF_HOSTS, PlanConfig
from .sharded_plan import Policy

UNDER_FSDP2 = (
    " Under FSDP2 losses were measured with at most 0.9 M parameters, and none with replicas= or with hosts+ of 8 bits or "
    "more."
)
REDUCE_IN_16 = " reduce_dtype=torch.bfloat16 in your policy sends as few bytes without gradwire."
HYBRID = "hybrid sharding"
SHORTEST, LONGEST = 1e-4, 3600.0  # seconds of a step's computation that the search for the longest one looks at


@dataclass(frozen=True)
class Way:
    """A way to train: its name, bytes of a GPU before activations, and the lines to paste."""

    name: str
    size: int
    lines: Sequence[str]

    def __str__(self) -> str:
        first, *others = self.lines
        return "\n    ".join([f"{first}  # {self.name}: {decimal(self.size)} of a GPU", *others])


@dataclass(frozen=True)
class Advice:
    """The recommendation for the hosts of a plan, as the page on choosing has it.

    `steps`: predicts a step without gradwire, then with each compressor. `whole_bytes`: of a rank that has the whole model,
    its gradients and optimizer.
    """

    config: PlanConfig
    steps: Callable[[PlanConfig], Sequence[Prediction]]
    whole_bytes: int

    @property
    def text(self) -> str:
        """The sentences, and the lines behind them."""
        several, lines = self.config.hosts > 1, self._lines()
        words = self._leaving if self.leaves else self._words
        policy, chosen = self.config.policy, (self.of_ddp if self.leaves else self).chosen
        if policy.param_dtype != policy.reduce_dtype and chosen in ("bf16", "bf16/bf16"):
            words += REDUCE_IN_16
        if not lines:
            return words
        launch = LAUNCH if several else "torchrun --nproc-per-node {per_host} train.py"
        lines.append(launch.format(hosts=self.config.hosts, per_host=self.config.cluster.gpus_per_host))
        runs = "Each host runs this; HOST is the first" if several else "Run this"
        runs += "; on GPUs with torch 2.15 or later, put TORCH_DIST_USE_NCCL2=0 before it"
        known = UNDER_FSDP2 if self.config.parallel == "fsdp" and any("attach" in line for line in lines) else ""
        return "\n    ".join([f"{words}{known} {runs}:", *lines])

    def _lines(self) -> list[str]:
        """Return the lines to paste, the best first."""
        attach, optimizer = "handle = gradwire.attach", self._optimizer
        if self.config.parallel == "ddp":
            return [f'{attach}(ddp_model, "{self.chosen}", optimizer={optimizer})'] if self.chosen else []
        sharded = []
        if self.chosen:
            gather, reduce = self.chosen.split("/")
            line = f'{attach}(model, gather="{gather}", reduce="{reduce}", optimizer={optimizer})'
            sharded = [str(Way("fully_shard on all ranks", self._sharded_bytes, [line]))]
        if self.config.timed and not self.leaves:
            return sharded
        others = [str(each) for each in self.ways]
        return [*others, *sharded] if self.leaves else [*sharded, *others]

    @cached_property
    def leaves(self) -> bool:
        """True if leaving shards on all ranks is the answer, by the rule: first without gradwire, then compressed shards."""
        if not (self.config.timed and self.ways):
            return False
        whole = self.of_ddp
        ladder = {"whole": whole.times[None], "shards": self.best_seconds, "compressed": whole.best_seconds}
        worth = Rule().worth({way: self.times[None] / seconds for way, seconds in ladder.items()})
        return worth[-1:] not in ([], ["shards"])

    @property
    def best_seconds(self) -> float:
        """The seconds of a step with the compressor to take, or without gradwire."""
        return self.times[self.chosen]

    @cached_property
    def ways(self) -> list[Way]:
        """The ways in place of shards on all ranks, but for those that are known not to fit. The fastest is the first."""
        if self.config.parallel == "ddp":
            return []
        config, spec, optimizer = self.config, self.of_ddp.chosen, self._optimizer
        if config.policy == Policy():
            name, line = "DDP", "ddp_model = torch.nn.parallel.DistributedDataParallel(model)"
        else:
            name = "replicate()"
            line = "for each in (*layers, model): replicate(each, mesh=mesh, mp_policy=policy)"
        whole = [line]
        hybrid = ['mesh = init_device_mesh("cuda", (hosts, per_host), mesh_dim_names=("replicate", "shard"))']
        if spec:
            model = "ddp_model" if name == "DDP" else "model"
            whole.append(f'handle = gradwire.attach({model}, "{spec}", optimizer={optimizer})')
            inner = spec.removeprefix(TWO_LEVELS)
            hybrid.append(f'handle = gradwire.attach(model, replicas="{inner}", optimizer={optimizer})')
        found = [Way(name, self.whole_bytes, whole)]
        if config.shared_card and config.bus is None and config.optimizer != "muon":
            found.append(Way(HYBRID, self.whole_bytes // config.gpus_per_host, hybrid))
        return [each for each in found if config.gpu_memory is None or each.size <= 1e9 * config.gpu_memory]

    @property
    def _leaving(self) -> str:
        """The verdict for leaving shards on all ranks, its condition, and what to do else."""
        best, whole = self.ways[0], self.of_ddp
        what = "The network takes"
        if self.config.step_seconds:  # of DDP, and replicate() computes longer
            what = "A step takes" + " at least" * (best.name == "replicate()")
        sharded = f" ({self.best_seconds:.3g} s with {_named(self.chosen)})" if self.chosen else ""
        with_it = f" ({whole.best_seconds:.3g} s with {_named(whole.chosen)})" if whole.chosen else ""
        verdict = whole._words
        if best.name == HYBRID:  # whose replicas= compresses between hosts alone
            with_it, verdict = (each.replace(f'"{TWO_LEVELS}', '"') for each in (with_it, verdict))
        memory, there = self.config.gpu_memory, "there" if best.name == HYBRID else f"with {best.name}"
        room = ", if it fits" if memory is None else f", if activations fit in the rest of {memory:g} GB"
        words = (
            f"Leave fully_shard on all ranks for {best.name}{room}: weights, gradients and "
            f"{self.config.optimizer or 'adamw'} take {decimal(best.size)} of a GPU before activations, and "
            f"{decimal(self._sharded_bytes)} with shards on all ranks. {what} {whole.times[None]:.3g} s {there}"
            f"{with_it}, and {self.times[None]:.3g} s with shards{sharded}. {best.name}: {verdict}"
        )
        if not self.chosen:
            words += " If it does not fit, keep fully_shard without gradwire."
        return words + " Or train with AdamW, whose step sends nothing." * (self.config.optimizer == "muon")

    @property
    def _sharded_bytes(self) -> int:
        return self.whole_bytes // self.config.ranks

    @property
    def _optimizer(self) -> str:
        return "[muon, adamw]" if self.config.optimizer == "muon" else "optimizer"

    @cached_property
    def of_ddp(self) -> Advice:
        """The advice for the same hosts with DDP."""
        return replace(self, config=with_ddp(self.config))

    @cached_property
    def pairs(self) -> list[str]:
        """The compressors to choose from, in the order of bytes: with Muon, fewer than 8 bits cost loss."""
        first, then = simplest(self.config, self.steps)
        found = dict.fromkeys((first, then, then.replace("int8", "int4")))
        kept = [each for each in found if self.config.optimizer != "muon" or wide(each)]
        if self.config.parallel == "ddp":
            return kept
        return [f"{each.replace('int4', 'int8')}/{each}" for each in kept]

    @property
    def chosen(self) -> str | None:
        """The compressor to take; None if none saves enough of a step."""
        place = taken(self.worth, few=False)
        return None if place is None else self.worth[place]

    @cached_property
    def worth(self) -> list[str]:
        """The compressors that save enough of a step; without a network's rate, all of them."""
        return Rule().worth(self.faster) if self.config.timed else self.pairs

    @cached_property
    def times(self) -> dict[str | None, float]:
        """The seconds of a step without gradwire (None) and with each compressor; by the network alone if none are given."""
        return self._times(self.config.step_seconds or SHORTEST)

    @property
    def faster(self) -> dict[str, float]:
        """By how much each compressor makes a step faster."""
        return _speed_ups(self.times)

    def _times(self, seconds: float) -> dict[str | None, float]:
        steps = self.steps(replace(self.config, compressors=self.pairs, step_seconds=seconds))
        return {spec: each.step for spec, each in zip((None, *self.pairs), steps, strict=True)}

    @property
    def _words(self) -> str:
        if self.chosen is None:
            best = max(filter(wide, self.faster), key=self.faster.__getitem__)
            where = " if NCCL sums in trees" if self.config.shared_card else ""
            below = min(round(self.faster[best], 2), Rule.worthwhile - 0.01)  # 1.1 is what it is not
            words = f"Do not compress{where}: {_named(best)} saves less than {LEAST} of a step ({below:.2f}x)."
            return (
                words
                + self._until
                + "".join(f" Next step: {_named(each)}{self._cost(each)}." for each in self.worth[:1])
            )
        words = f"Take {_named(self.chosen)}{self._cost(self.chosen)}.{self._until}"
        words += f" Loss: no difference seen {self._measured(self.chosen)}." * wide(self.chosen)
        beyond = self.pairs[self.pairs.index(self.chosen) + 1 :]
        if less := [_named(each) for each in beyond if each not in self.worth]:
            words += f" {' and '.join(less)} would save less than {LEAST} of that step."
        words += "".join(f" Next step: {_named(each)}{self._cost(each)}." for each in beyond if each in self.worth)
        return words + " Stop there: with Muon, 4 bits cost loss." * (self.config.optimizer == "muon")

    def _cost(self, spec: str) -> str:
        """The clause for fewer than 8 bits: the time that they save over the compressor to take, and the cost in loss."""
        if wide(spec):
            return ""
        saves = ""
        if self.config.step_seconds and spec != self.chosen:
            before, whose = (self.faster[self.chosen], "its") if self.chosen else (1.0, "a")
            saves = f"saves {1 - before / self.faster[spec]:.0%} of {whose} step and "
        return f", which {saves}can cost loss ({self._measured(spec)})".replace("%", " %")

    def _measured(self, spec: str) -> str:
        """Return with which optimizer and how large a model the loss of a compressor of gradients was measured."""
        (candidate,) = (each for each in CANDIDATES if each.spec == spec.rpartition("/")[2].removeprefix(TWO_LEVELS))
        kind = {"sgd": SGD, "muon": MUON}.get(self.config.optimizer or "", ADAMW)
        loss = "" if wide(spec) else f"{candidate.losses[kind]:+.1%} "
        under = " under DDP" * (self.config.parallel == "fsdp") + " without hosts+" * (TWO_LEVELS in spec)
        return f"{loss}with {kind}, measured{under} with at most {candidate.largest[kind] / MEGA:.3g} M parameters"

    @property
    def _until(self) -> str:
        """Up to which computation of a step one of the compressors pays; nothing without a network's rate."""
        if not (self.config.timed and self._pays(SHORTEST)):
            return ""
        if self._pays(LONGEST):
            return " Compression pays even if a step computes for an hour."
        low, high = math.log(SHORTEST), math.log(LONGEST)
        while high - low > 0.004:
            middle = (low + high) / 2
            low, high = (middle, high) if self._pays(math.exp(middle)) else (low, middle)
        return f" Compression pays while a step computes for less than about {float(f'{math.exp(low):.2g}'):,g} s."

    def _pays(self, seconds: float) -> bool:
        return taken(Rule().worth(_speed_ups(self._times(seconds))), few=False) is not None


def _speed_ups(times: Mapping[str | None, float]) -> dict[str, float]:
    return {spec: times[None] / seconds for spec, seconds in times.items() if spec is not None}


def _named(spec: str) -> str:
    gather, _, reduce = spec.partition("/")
    return f'"{gather}"' if reduce in ("", gather) else f'gather="{gather}", reduce="{reduce}"'


def with_ddp(config: PlanConfig) -> PlanConfig:
    """Return the plan of the same hosts with DDP."""
    return replace(config, parallel="ddp", compressors=list(OF_DDP), dtype=config.dtypes[-1], gpu_memory=None)


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
