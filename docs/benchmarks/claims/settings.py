"""Claims of bytes, memory and defaults, computed by the code itself, and figures of other people's pages."""

import inspect
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from functools import cache

import torch
from torch import nn

import gradwire
from claims.claim import PREDICTED, PUBLISHED, SETTING, Claim, Source, number, times
from gradwire.experiments.advice import Rule
from gradwire.experiments.plan import plan_command
from gradwire.experiments.plan_config import PlanConfig
from gradwire.experiments.sharded_plan import plan_sharded
from gradwire.hooks.internet.client import SEARCH

PLAN = Source("experiments/bucket_plan.py", "gradwire.plan", "computed from shapes", "124 M")
BOX = Source("experiments/bucket_plan.py", "gradwire.plan", "computed from shapes", "1.2 B")
MEMORY = ("int4", "int4:residual_bits=8")
EGOVERSE = {"none": 6.4, "bf16": 3.6, "alone": 1.4}  # seconds of a step
EGOVERSE_SOURCE = Source("EgoVerse, pull request 667", "", "8 A40 in one box", "1.2 B")
LOONGFORGE_SOURCE = Source("LoongForge, pull request 223", "", "8 GPUs in one box")
LOSSES_SOURCE = Source("LoongForge, pull request 231", "", "8 GPUs in one box", "GR00T-N1.7", "300")


@cache
def gpt() -> nn.Module:
    """Return the matrices of GPT-2 small on no device; its head is its embedding."""

    def block(width: int) -> nn.Module:
        sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        return nn.Sequential(*(nn.Linear(*size) for size in sizes))

    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(50257, 768), nn.Embedding(1024, 768), *(block(768) for _ in range(12)))


@cache
def matrices(width: int = 1024, count: int = 4) -> nn.Module:
    """Return square matrices without biases on no device."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def fewer(values: tuple[float, ...]) -> str:
    """Return a factor without an empty decimal."""
    return times(values).replace(".0x", "x")


def state(spec: str, ranks: int) -> float:
    """Return the bytes per parameter that a rank keeps between steps."""
    model = matrices()
    return gradwire.plan(model, spec, world_size=ranks).state_bytes / sum(each.numel() for each in model.parameters())


def sharded(gather: str, reduce: str, ranks: int = 16) -> float:
    """Return what FSDP2 sends from a rank per step, in units of 4 N (n - 1) / n bytes, for N parameters on n ranks."""
    named = dict(matrices(512, 64).named_parameters())  # many, since torch gathers the last one once
    unit = 4 * sum(each.numel() for each in named.values()) * (ranks - 1) / ranks
    small = {"root": torch.empty(1, device="meta")}  # torch gathers the root's parameters once
    parts = [small, *({name: each} for name, each in named.items())]
    return plan_sharded(parts, gather, reduce, world_size=ranks).sent_bytes_per_step / unit


@cache
def as_plan(values: Sequence[float]) -> str:
    """Return a speed-up with the digits that `gradwire plan` prints."""
    return f"{values[0]:.2f}x"


def with_muon() -> dict[str, dict[str, float]]:
    """Return the rows of `gradwire plan` by compressor, for 350 M parameters in 16 bits with Muon on four hosts."""
    config = PlanConfig(
        parallel="fsdp",
        parameters="350M",
        hosts=4,
        rate="10gbit",
        step_seconds=0.5,
        dtype="bf16",
        optimizer="muon",
        json=True,
    )
    with redirect_stdout(io.StringIO()) as text:
        plan_command(config)
    return {row["compressor"]: row for row in json.loads(text.getvalue())["rows"]}


def of_muon() -> Iterator[Claim]:
    """Yield the bytes and the speed-ups of steps with Muon under FSDP2 and under DDP."""
    command = "gradwire plan --parallel fsdp --parameters 350M --hosts 4 --rate 10gbit --step-seconds 0.5 --dtype bf16"
    source = Source("experiments/plan.py", f"{command} --optimizer muon", "computed from shapes", "350 M")
    for spec in ("torch", "int8", "DDP none", "DDP int8"):
        row = with_muon()[spec]
        sent = lambda row=row: [row["sent_bytes_per_step"] / 1e9]  # noqa: E731
        yield Claim(f"Muon sent {spec}", PREDICTED, source, sent, number("GB", 1))
        yield Claim(f"Muon step {spec}", PREDICTED, source, lambda row=row: [row["speed_up"]], as_plan)


def of_plan() -> Iterator[Claim]:
    """Yield bytes sent and memory kept."""
    for spec in ("bf16", "int8", "int4"):
        compute = lambda spec=spec: [gradwire.plan(gpt(), spec, world_size=4).compression_ratio]  # noqa: E731
        yield Claim(f"bytes {spec}", PREDICTED, PLAN, compute, fewer)
    for spec in (*MEMORY, "powersgd:rank=4"):
        compute = lambda spec=spec: [state(spec, 8), state(spec, 2)]  # noqa: E731
        form = lambda values: " to ".join(dict.fromkeys(f"{value:.3g}" for value in values)) + " bytes"  # noqa: E731
        yield Claim(f"memory {spec}", PREDICTED, PLAN, compute, form)


def _minutes(parameter: str) -> Iterator[float]:
    yield inspect.signature(gradwire.Rendezvous).parameters[parameter].default.total_seconds() / 60


def of_defaults() -> Iterator[Claim]:
    """Yield defaults that pages name."""
    rendezvous = Source("hooks/internet/client.py", "gradwire.Rendezvous", "the code")
    for name in ("limit", "start"):
        yield Claim(name, SETTING, rendezvous, lambda name=name: list(_minutes(name)), number("minutes"))
    yield Claim("search", SETTING, rendezvous, lambda: [SEARCH], number("seconds"))
    rule = Source("experiments/advice/recommendation.py", "gradwire advise", "the code")
    yield Claim("worthwhile", SETTING, rule, lambda: [100 * (1 - 1 / Rule().worthwhile)], number("%"))
    yield Claim(
        "confidence", SETTING, Source("docs/benchmarks/claims/claim.py", "", "the code"), lambda: [95], number("%")
    )
    yield Claim("tolerance", SETTING, rule, lambda: [100 * Rule().tolerance], number("%"))


def of_reports() -> Iterator[Claim]:
    """Yield figures of other people's pages, and what follows from them."""
    for name, seconds in EGOVERSE.items():
        yield Claim(f"EgoVerse {name}", PUBLISHED, EGOVERSE_SOURCE, lambda it=seconds: [it], number("s", 1))
    for name, value in (("all-reduce", 557), ("backward", 336)):
        yield Claim(f"LoongForge {name}", PUBLISHED, LOONGFORGE_SOURCE, lambda it=value: [it], number("ms"))
    code = Source("docs/benchmarks/claims/settings.py", "", "8 GPUs in one box")
    yield Claim("LoongForge exposed", PREDICTED, code, lambda: [557 - 336], number("ms"))
    for name, per_cent in (("all", 10.87), ("exempt", 2.13), ("no feedback", 4.19)):
        yield Claim(f"float8 {name}", PUBLISHED, LOSSES_SOURCE, lambda it=per_cent: [it], number("%", 2))


def claims() -> Iterator[Claim]:
    """Yield all claims of this file."""
    yield from of_plan()
    yield from of_muon()
    yield from of_defaults()
    yield from of_reports()
