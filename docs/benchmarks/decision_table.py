"""The tables of which compressor, and the predictions in them.

    python docs/benchmarks/decision_table.py --write

puts the tables of hooks/advice/decision_table.py into README.md and docs/choosing.md; without --write it prints them.
Then it computes the predicted speed-ups again. A prediction is a bound: it leaves out the time to encode, and takes a
network at full speed.
"""

import re
import sys
from functools import cache
from pathlib import Path

import torch
from torch import nn

import gradwire
from gradwire.experiments.workloads.emulation import EmulatedModel, load_trace
from gradwire.hooks.advice.decision_table import (
    ADAMW,
    ANSWERS,
    AS_ADAMW,
    BOX,
    FAST,
    GIGABIT,
    NETWORKS,
    OPTIMIZERS,
    SGD,
    SLOW,
    TEN,
    Answer,
)

ROOT = Path(__file__).parents[2]
GIGABITS = {TEN: 10, FAST: 25}
CASES = {SLOW: "r18-2-100m", GIGABIT: "r18-4-1g"}  # of ResNet-18
GPT, RESNET = "GPT 124 M", "ResNet-50"
SECONDS = {  # of a step's computation, and of its backward, which hides communication
    GPT: (0.121, 0.080),  # measured on one H100: 64 sequences of 512 tokens
    RESNET: (0.097, 0.065),  # published for a V100: 32 images; two thirds of it are backward, which is assumed
}
REPORT = {"parameters": 1.2e9, "ranks": 8, "none": 6.4, "bf16": 3.6, "alone": 1.4}  # EgoVerse, pull request 667


def gpt() -> nn.Module:
    """Return the matrices of GPT-2 small."""

    def block(width: int) -> nn.Module:
        sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        return nn.Sequential(*(nn.Linear(*size) for size in sizes))

    return nn.Sequential(nn.Embedding(50257, 768), nn.Embedding(1024, 768), *(block(768) for _ in range(12)))


@cache
def sent(name: str, spec: str, ranks: int) -> float:
    """Return the bytes that a rank sends per step."""
    with torch.device("meta"):
        model = gpt() if name == GPT else EmulatedModel(load_trace("resnet50"))
    return gradwire.plan(model, spec, world_size=ranks).sent_bytes_per_step


def step(name: str, spec: str, gigabits: float, ranks: int = 4) -> float:
    """Return the seconds of a step whose communication hides behind backward where it can."""
    computation, backward = SECONDS[name]
    return computation + max(0.0, sent(name, spec, ranks) * 8 / (gigabits * 1e9) - backward)


def of_box(spec: str) -> float:
    """Return the seconds of a step of the report: exposed communication in proportion to the bytes."""
    exposed = REPORT["none"] - REPORT["alone"]
    return REPORT["alone"] + exposed * sent(GPT, spec, REPORT["ranks"]) / sent(GPT, "none", REPORT["ranks"])


def rate_of_box() -> float:
    """Return the Gbit/s of each GPU in the report's box, if all of its communication is exposed."""
    ranks = REPORT["ranks"]
    all_bytes = 2 * (ranks - 1) / ranks * 4 * REPORT["parameters"]
    return all_bytes * 8 / (REPORT["none"] - REPORT["alone"]) / 1e9


def predicted(answer: Answer, spec: str) -> float | None:
    """Return the speed-up of a compressor over bf16 in a cell; None if the cell's source has no formula."""
    if answer.network in GIGABITS:
        name, rate = RESNET if answer.optimizer == SGD else GPT, GIGABITS[answer.network]
        return step(name, "bf16", rate) / step(name, spec, rate)
    if answer.network != BOX:
        return None
    if answer.optimizer == SGD:
        return step(RESNET, "bf16", rate_of_box(), 8) / step(RESNET, spec, rate_of_box(), 8)
    return REPORT["bf16"] / of_box(spec)


def measured_steps(answer: Answer) -> float:
    """Return the speed-up over bf16 of the steps of ResNet-18 that were measured beside the advice for them."""
    text = (ROOT / "docs" / "results" / "advise" / "README.md").read_text("utf-8")
    row = r"\| {} \| `{}` \| backward \| [\d.]+ \| ([\d.]+) \|"
    case = CASES[answer.network]
    bf16, other = (re.search(row.format(case, spec), text) for spec in ("bf16", answer.compressor))
    return float(bf16[1]) / float(other[1])


def figures(answer: Answer) -> tuple[str, str, str]:
    """Return a cell's compressor, speed-up and expected loss as the tables show them."""
    place = " in `LocalSteps`" if answer.local_loss is not None else ""
    loss = f"{answer.expected_loss * 100:+.1f} %".replace("+0.0", "0.0").replace("-0.0", "0.0")
    return f"`{answer.compressor}`{place}", f"{answer.speed_up:g}x" if answer.speed_up != 1 else "1.0x", loss


def readme_table() -> str:
    """Return README's table: AdamW's column."""
    lines = ["| your network | compressor | speed-up over `bf16` | validation loss | source |", "|---|---|---|---|---|"]
    for answer in ANSWERS:
        if answer.optimizer == ADAMW:
            lines.append(f"| {answer.network} | {' | '.join(figures(answer))} | {answer.kind} |")
    return "\n".join(lines)


def whole_table() -> str:
    """Return the table of docs/choosing.md: a row for each network, a column for each optimizer."""
    lines = [f"| your network | {' | '.join(OPTIMIZERS)} |", "|---|" + "---|" * len(OPTIMIZERS)]
    for network in NETWORKS:
        row = {answer.optimizer: answer for answer in ANSWERS if answer.network == network}
        cells = [f"{', '.join(figures(row[name]))}, {row[name].kind}" for name in OPTIMIZERS]
        lines.append(f"| {network} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(page: Path, table: str) -> None:
    """Replace the first table of networks on a page."""
    text = page.read_text("utf-8")
    start = text.index("| your network |")
    page.write_text(text[:start] + table + text[text.index("\n\n", start) :], "utf-8")


def main() -> None:
    """Print or write the tables; print each prediction that has a formula beside the table's figure."""
    for page, table in (("README.md", readme_table()), ("docs/choosing.md", whole_table())):
        if "--write" in sys.argv:
            write(ROOT / page, table)
        else:
            print(f"{page}:\n\n{table}\n")
    for answer in ANSWERS:
        if answer.source != AS_ADAMW and (computed := predicted(answer, answer.compressor)) is not None:
            print(
                f"{answer.network}, {answer.optimizer}: {answer.compressor} {computed:.2f}x, table {answer.speed_up}x"
            )


if __name__ == "__main__":
    main()
