"""Predicted steps: the situations of the decision table, and how near predictions are to steps that were measured.

Both come from one function, `gradwire.experiments.ddp_step.predicted_step`. Without an option it prints the situations.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from statistics import median

import torch
from driver import parser_of
from torch import Tensor

from gradwire.experiments.advice.predict import Prediction
from gradwire.experiments.ddp_step import (
    BACKWARD,
    Cluster,
    Cost,
    GpuStep,
    gpt,
    layered,
    predicted_step,
    readiness,
)
from gradwire.experiments.workloads.emulation import load_trace

ROOT = Path(__file__).parents[2]
PAGE, STEPS = ROOT / "docs" / "results" / "advise" / "gpus.md", ROOT / "docs" / "benchmarks" / "predicted-steps.csv"
H100_STEP = json.loads((ROOT / "docs/benchmarks/h100/step-gpu.json").read_text("utf-8"))["cases"][0]
GIGABIT = 1e9 / 8  # bytes a second
SPECS = {  # a name in tables: what `attach` makes of it beside AdamW
    "none": "none",
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4:error_feedback=false",
    "hosts+bf16": "hosts+bf16",
    "hosts+int8": "hosts+int8",
    "hosts+int4": "hosts+int4:error_feedback=false",
}
A40_REPORT = {"none": 6.4, "bf16": 3.6, "alone": 1.4}  # seconds of a step; EgoVerse, pull request 667, September 2026
A40_PARAMETERS, A40_GPUS = 1_200_000_000, 8


@dataclass(frozen=True)
class Situation:
    """A cluster that trains. `network`: in Gbit/s of a host's card; None for a box whose GPUs share a bus.

    `steps`: by compressor, two predictions between which the step lies: NCCL's all-reduces go in trees, or in rings; in the
    box, two thirds of computation hide communication, or nothing does.
    """

    model: str
    gpu: str
    hosts: int
    gpus_per_host: int
    network: float | None
    micro_batches: int
    steps: dict[str, tuple[Prediction, Prediction]]

    def speed_up(self, name: str, over: str | None = None) -> tuple[float, float]:
        """Return the speed-up of a compressor over another one, least and most.

        By default over bf16 that is sent in the same way: within hosts first if the compressor is between hosts alone.
        """
        over = over or ("hosts+bf16" if name.startswith("hosts+") and name != "hosts+bf16" else "bf16")
        found = [other.step / mine.step for mine, other in zip(self.steps[name], self.steps[over], strict=True)]
        return min(found), max(found)


@cache
def gpt2_small() -> dict[str, Tensor]:
    """Return the gradients of GPT-2 small, 124 M parameters, whose head shares the embedding."""
    return gpt(768, 12, 50_257, 1_024)


def h100_step(micro_batches: int) -> GpuStep:
    """Return a step of GPT-2 small on an H100: the seconds of `h100/step-gpu.json`, with the optimizer, 64 sequences of 512.

    The model that was measured has 162 M parameters: its head has a matrix of its own. It computes as much. Two thirds of
    the seconds are taken to be backward: that is an assumption.
    """
    gradients = gpt2_small()
    ready = readiness(gradients, tied=["wte"])
    return GpuStep(gradients, ready, H100_STEP["median_s"], None, micro_batches, H100_STEP["host_s"])


@cache
def a40_box(backward: float) -> tuple[GpuStep, Cluster]:
    """Return the step and the box of the report, if so many seconds hide communication.

    The bus is as fast as the uncompressed step says: with `bf16` the prediction is checked. Gradients arrive evenly.
    """
    gradients = layered(A40_PARAMETERS)
    step = GpuStep(gradients, readiness(gradients), A40_REPORT["alone"], backward)
    sent = 2 * (A40_GPUS - 1) / A40_GPUS * 4 * sum(each.numel() for each in gradients.values())
    bus = sent / (A40_REPORT["none"] - A40_REPORT["alone"])
    for _ in range(20):  # exposed seconds fall about as the rate grows
        cluster = Cluster(1, A40_GPUS, float("inf"), bus, "A40", rings=True)
        late = predicted_step(step, cluster, "none").step - A40_REPORT["none"]
        bus = sent / (sent / bus - late)
    return step, cluster


def situations() -> list[Situation]:
    """Return the situations of the decision table, with predictions for `SPECS`."""
    found = []
    for hosts, gpus in ((2, 1), (2, 8), (4, 1)):
        names = [name for name in SPECS if gpus > 1 or not name.startswith("hosts+")]
        for rate in (1, 10, 25):
            clusters = [Cluster(hosts, gpus, rate * GIGABIT, rings=rings) for rings in (False, True)]
            for batches in (1, 4):
                step = h100_step(batches)
                steps = {name: tuple(predicted_step(step, each, SPECS[name]) for each in clusters) for name in names}
                found.append(Situation("GPT-2 small, 124 M", "H100", hosts, gpus, rate, batches, steps))
    boxes = [a40_box(backward) for backward in (BACKWARD * A40_REPORT["alone"], 0.0)]
    steps = {
        name: tuple(predicted_step(*each, SPECS[name]) for each in boxes) for name in ("none", "bf16", "int8", "int4")
    }
    return [*found, Situation("1.2 B parameters", "A40", 1, A40_GPUS, None, 1, steps)]


def spread(low_high: tuple[float, float], digits: int, unit: str) -> str:
    """Return a number, or two where they differ."""
    low, high = (f"{value:.{digits}f}" for value in sorted(low_high))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def situation_rows() -> Iterator[str]:
    """Yield the table of situations."""
    heads = ("hosts x GPUs", "network", "micro-batches", "compressor", "step", "encoding", "through a card")
    yield f"| {' | '.join((*heads, 'over bf16', 'over none'))} |\n|{'---|' * (len(heads) + 2)}"
    for each in situations():
        network = "bus" if each.network is None else f"{each.network:g} Gbit/s"
        place = f"{each.hosts} x {each.gpus_per_host} {each.gpu} | {network} | {each.micro_batches}"
        for name, (one, other) in each.steps.items():
            sent = spread((one.card_bytes / 1e6, other.card_bytes / 1e6), 0, " MB")
            seconds = spread((1e3 * one.step, 1e3 * other.step), 0, " ms")
            faster = [spread(each.speed_up(name, over), 2, "x") for over in ("bf16", "none")]
            cells = (place, f"`{name}`", seconds, f"{1e3 * one.encode:.1f} ms", sent, *faster)
            yield f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Check:
    """A measured step beside its prediction, in seconds."""

    case: str
    spec: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The part of the measured step by which the prediction is too long."""
        return self.predicted / self.measured - 1


def of_trace(name: str, computation: float = 0.0, backward: float = 0.0) -> GpuStep:
    """Return the step of an emulated accelerator, whose seconds are known by layers; or with these seconds."""
    trace = load_trace(name)
    layers = trace.layers[::-1]
    ends = accumulate(layer.backward_seconds for layer in layers)
    ready = {
        layer.full(parameter): end / trace.backward_seconds
        for layer, end in zip(layers, ends, strict=True)
        for parameter in reversed(layer.parameters)
    }
    gradients = {parameter: torch.empty(trace.parameters[parameter], device="meta") for parameter in ready}
    return GpuStep(gradients, ready, computation or trace.seconds, backward or trace.backward_seconds)


EMULATED = {  # cases of docs/results/advise: trace, dilation, hosts, ranks a host, Gbit/s of a host
    "r18-2-100m": ("resnet18-cifar", 1, 2, 1, 0.1),
    "r18-4-1g": ("resnet18-cifar", 4, 4, 1, 1),
    "r18-8-10g": ("resnet18-cifar", 10, 8, 1, 10),
    "gpt-4-1g": ("gpt-20m", 2, 4, 1, 1),
    "gpt-2-10g": ("gpt-20m", 10, 2, 1, 10),
    "r50-4-4g": ("resnet50", 8, 4, 1, 4),
    "r50-2-10g": ("resnet50", 6, 2, 1, 10),
    "lab-r18-4-1g": ("resnet18-cifar", 3, 4, 1, 1),
    "lab-r18-8-1g": ("resnet18-cifar", 8, 8, 1, 1),
    "lab-gpt-4-300m": ("gpt-20m", 1, 4, 1, 0.3),
    "lab-r18-2x2-1g": ("resnet18-cifar", 4, 2, 2, 1),
}


def points(study: str) -> list[dict]:
    """Return the points of a study: of those that ran again the last."""
    lines = (ROOT / f"docs/results/{study}/points.jsonl").read_text("utf-8").splitlines()
    return list({tuple(sorted(point["arguments"])): point for point in map(json.loads, lines)}.values())


@cache
def trainings() -> list[dict]:
    """Return the rows of docs/results/time-to-accuracy-gpt of four ranks on two cores that compress alike in all steps.

    Each has its `computer`.
    """
    found = points("time-to-accuracy-gpt")
    rows = [row | {"computer": point["environment"]["platform"]} for point in found for row in point["rows"]]
    return [row for row in rows if "netlab.rate" in row and "warmup" not in row["compressor"]]  # others are simulated


def codec_seconds(row: dict) -> float:
    """Return the seconds of a step that a training encoded and decoded."""
    return row["seconds.encode"] + row["seconds.decode"]


def on_cores(spec: str, ranks: int, dilate: float = 1.0) -> Cost:
    """Return the cost of a compressor where ranks share two cores, by the least that it took four of them in a training."""
    rows = sorted(trainings(), key=codec_seconds, reverse=True)
    known = {row["compressor"]: codec_seconds(row) for row in rows}
    inner = spec.removeprefix("hosts+")
    seconds = known.get(inner, known["fp16+powersgd:rank=4" if "rank=4" in inner else "int4"])
    return Cost(0.0 if spec == "none" else seconds / WORDY * ranks / 4 / dilate, beside=True)


WORDY = 19_210_240  # parameters of that training's model


def of_advise() -> Iterator[Check]:
    """Yield the steps of docs/results/advise in backward's order, but for those of a model that computes on shared cores."""
    text = (ROOT / "docs/results/advise/steps.csv").read_text("utf-8")
    for row in csv.DictReader(text.splitlines()):
        case, spec, milliseconds = row["case"], row["compressor"], row["measured_ms"]
        if case in EMULATED and row["order"] == "backward":
            trace, dilate, hosts, ranks, rate = EMULATED[case]
            cluster, cost = Cluster(hosts, ranks, rate * GIGABIT, rings=True), on_cores(spec, hosts * ranks, dilate)
            step = predicted_step(of_trace(trace), cluster, spec, cost=cost).step
            yield Check(case, spec, step, float(milliseconds) / 1e3)


def of_bandwidth() -> Iterator[Check]:
    """Yield the steps of docs/results/gpt-bandwidth. Forward, backward and optimizer take what they took in that row."""
    for point in points("gpt-bandwidth"):
        dilate = next(float(each.removeprefix("--dilate=")) for each in point["arguments"] if "--dilate=" in each)
        for row in point["rows"]:
            forward, backward, rest = (row[f"phases.{name}"] / dilate for name in ("forward", "backward", "optimizer"))
            step = of_trace("gpt-20m", forward + backward + rest, backward)
            rate, spec = row["netlab.rate"].removesuffix("gbit"), row["compressor"]
            cluster, cost = Cluster(4, 1, float(rate) * GIGABIT, rings=True), on_cores(spec, 4, dilate)
            seconds = predicted_step(step, cluster, spec, cost=cost).step
            yield Check(f"gpt-bandwidth, {rate}g", spec, seconds, row["sec_per_iter.p50"] / dilate)


def of_training() -> Iterator[Check]:
    """Yield the steps of docs/results/time-to-accuracy-gpt.

    Computation: the fastest step on the same computer, without its compression.
    """
    for row in trainings():
        same = (each for each in trainings() if each["computer"] == row["computer"])
        fastest = min(same, key=lambda each: each["step_seconds.p50"])
        computation = fastest["step_seconds.p50"] - codec_seconds(fastest)
        step = of_trace("gpt-20m", computation, computation * 2 / 3)
        rate = {"100mbit": 0.1, "1gbit": 1.0}[row["netlab.rate"]]
        spec, cluster = row["tuned"] or row["compressor"], Cluster(4, 1, rate * GIGABIT, rings=True)
        cost = Cost(codec_seconds(row) / WORDY)  # on the cores that compute
        seconds = predicted_step(step, cluster, spec, cost=cost).step
        yield Check(f"time-to-accuracy-gpt, {rate:g}g", spec, seconds, row["step_seconds.p50"])


def of_gpus() -> Iterator[Check]:
    """Yield the steps of one H100, by what compressors cost on an H200. That model's head has a matrix of its own."""
    width, words = 768, 50_304
    gradients = gpt(width, 12, words, 1)
    gradients = {"head": gradients["wte"]} | gradients  # 162 M parameters
    alone = GpuStep(gradients, readiness(gradients, free=["wte"]), H100_STEP["median_s"], None, 1, H100_STEP["host_s"])
    for case in json.loads((ROOT / "docs/benchmarks/h100/step-gpu.json").read_text("utf-8"))["cases"]:
        if case["case"].startswith("gradwire:"):
            spec = case["case"].removeprefix("gradwire:").removesuffix("@25")
            step = predicted_step(alone, Cluster(1, 1, float("inf")), spec).step
            yield Check("one H100, no network", spec, step, case["median_s"])


def of_box() -> Iterator[Check]:
    """Yield the steps of the report of 8 A40. The uncompressed step says how fast the bus is."""
    for what, backward in (("two thirds hide", BACKWARD * A40_REPORT["alone"]), ("nothing hides", 0.0)):
        step = predicted_step(*a40_box(backward), "bf16").step
        yield Check(f"8 x A40, {what}", "bf16", step, A40_REPORT["bf16"])


def checks() -> dict[str, list[Check]]:
    """Return all measured steps that the function can predict, by what they are of."""
    advise = list(of_advise())
    plain = [each for each in advise if each.spec in ("none", "bf16", "hosts+bf16")]
    packed = [each for each in advise if each not in plain]
    return {
        "[one H100](../../benchmarks/h100/README.md), nothing to send": list(of_gpus()),
        "8 x A40, public report": list(of_box()),
        "[GPT by bandwidth](../gpt-bandwidth/README.md), four hosts": list(of_bandwidth()),
        "[GPT in training](../time-to-accuracy-gpt/README.md), four hosts": list(of_training()),
        "[emulated accelerators](README.md#cases), `none` and `bf16`": plain,
        "the same, compressed": packed,
    }


def check_rows() -> Iterator[str]:
    """Yield the table of errors."""
    yield "| measured steps | number | median error | least | most |\n|---|---|---|---|---|"
    for name, group in checks().items():
        errors = sorted(each.error for each in group)
        size = median(map(abs, errors))
        yield f"| {name} | {len(errors)} | {size:.1%} | {errors[0]:+.1%} | {errors[-1]:+.1%} |"


def all_rows() -> Iterator[str]:
    """Yield all steps as lines of CSV."""
    yield "case,compressor,predicted_ms,measured_ms,error"
    for each in chain(*checks().values()):
        yield f'"{each.case}","{each.spec}",{each.predicted * 1e3:.1f},{each.measured * 1e3:.1f},{each.error:+.1%}'


def write() -> None:
    """Write the page's table and the file of all steps."""
    text = PAGE.read_text("utf-8")
    start = text.index("| measured steps |")
    PAGE.write_text(text[:start] + "\n".join(check_rows()) + text[text.index("\n\n", start) :], "utf-8")
    STEPS.write_text("\n".join(all_rows()) + "\n", "utf-8")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="print the table of errors in docs/results/advise/gpus.md")
    parser.add_argument("--write", action="store_true", help="write it there, and all steps to predicted-steps.csv")
    asked = parser.parse_args()
    if asked.write:
        write()
    else:
        print("\n".join(check_rows() if asked.check else situation_rows()))
