"""Local SGD between sites on paper, by the formulas of `gradwire plan --sites`: python sites_on_paper.py

Three tables: the bandwidth that a share of time computing needs, rounds of up to 10,000 sites, and seconds to the loss of
bf16 at 10 Mbit/s where a step computes for 0.1 s. Nothing here is measured but the steps to that loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gradwire import compressor, plan
from gradwire.experiments.sites_plan import EVERY, Wan, computing_share, round_plan
from gradwire.experiments.workloads.models import ModelConfig, build_model
from gradwire.hooks.local_sgd.fragment import grouped

GBIT, MBIT, SIDE, ENDLESS = 1e9 / 8, 1e6 / 8, 4096, 1e15
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
MODELS = {"1 B, 0.1 s": (1e9, 0.1), "10 B, 1 s": (1e10, 1.0), "100 B, 5 s": (1e11, 5.0)}  # parameters, a step's seconds
WAYS = {  # compressor, steps between averages, fragments, overlap
    "every step, bf16": ("bf16", 1, 1, False),
    "every step, int4": ("int4", 1, 1, False),
    "every 64, none, one part, no overlap": ("none", 64, 1, False),
    "every 64, none": ("none", 64, 4, True),
    "every 64, int4": ("int4", 64, 4, True),
    "every 64, int2": ("int2", 64, 4, True),
}
MANY = (4, 64, 1000, 10_000)
DAY = 86400.0
TO_LOSS = {  # steps to bf16's loss: docs/results/local-steps, 10 Mbit/s
    "bf16": 155,
    "int4": 168,
    "int2": 198,
    "powersgd:rank=4": 198,
    "powersgd:rank=4,payload=int8": 201,
}
LOCAL_TO_LOSS = {8: 205, 16: 235, 32: 244, 64: 284, 128: 305, 256: 316}  # by steps between averages, int4
SIZES = {"as measured": (128, 4), "19 M": (512, 6), "302 M": (1024, 24)}  # width and layers of a GPT


def matrices(elements: float) -> dict[str, Tensor]:
    """Return so many parameters, in square matrices."""
    return {str(place): torch.empty(SIDE, SIDE, device="meta") for place in range(round(elements / SIDE**2))}


def seconds_of_rounds(spec: str, parameters: Mapping[str, Tensor], fragments: int, wan: Wan) -> list[float]:
    """Return the seconds of each fragment's round."""
    parts = grouped(parameters, fragments).values()
    return [round_plan(compressor(spec), part, wan).seconds for part in parts]


def share(every: int, step: float, rounds: list[float], *, overlap: bool = True) -> float:
    """Return the share of time computing over the rounds of all fragments."""
    shares = [computing_share(every, len(rounds), step, each, overlap=overlap) for each in rounds]
    return len(shares) / sum(1 / each for each in shares)


def bandwidth(way: str, elements: float, step: float) -> list[float]:
    """Return the Gbit/s at which each of SHARES is reached, of 4 sites; infinite where none does.

    Sites are 60 ms apart, but averages of every step take no time beyond their bytes.
    """
    spec, every, fragments, overlap = WAYS[way]
    trip, parts = 0.06 if every > 1 else 0.0, matrices(elements)
    slow, endless = (seconds_of_rounds(spec, parts, fragments, Wan(4, rate, rate, trip)) for rate in (1.0, 1e30))
    found = []
    for wanted in SHARES:
        low, high = 1e3, ENDLESS  # bytes per second
        while high / low > 1.0001:
            middle = (low * high) ** 0.5
            rounds = [(bytes_ - wait) / middle + wait for bytes_, wait in zip(slow, endless, strict=True)]
            low, high = (low, middle) if share(every, step, rounds, overlap=overlap) >= wanted else (middle, high)
        found.append(high / GBIT if high < ENDLESS / 2 else math.inf)
    return found


def bandwidths() -> Table:
    """The first table."""
    table = Table(
        "model, step", "average", *(f"{each:.0%}" for each in SHARES), title="Gbit/s up and down of each site"
    )
    for name, (elements, step) in MODELS.items():
        for way in WAYS:
            found = bandwidth(way, elements, step)
            table.add_row(name, way, *("-" if each == math.inf else f"{each:,.3g}" for each in found))
    return table


def many() -> Table:
    """The second table."""
    title = "A round of a model of 1 B parameters in 4 fragments, 110 Mbit/s up, 500 down, 60 ms, steps of 1 s"
    table = Table(
        "compressor", "sites", "up, MB", "down, MB", "round, s", "every", "computing", "killed in a round", title=title
    )
    for spec in ("int4", "int2", "topk:ratio=0.001"):
        for sites in MANY:
            wan = Wan(sites, 110 * MBIT, 500 * MBIT, 0.06)
            parts = grouped(matrices(1e9), 4).values()
            rounds = [round_plan(compressor(spec), part, wan) for part in parts]
            seconds = [each.seconds for each in rounds]
            every = next((each for each in EVERY if share(each, 1.0, seconds) >= 0.95), EVERY[-1])
            up, down, mean = (sum(each) / 4 for each in ((r.up for r in rounds), (r.down for r in rounds), seconds))
            killed = sites * mean / DAY
            table.add_row(
                spec, f"{sites:,}", f"{up / 1e6:,.0f}", f"{down / 1e6:,.0f}", f"{mean:,.0f}", str(every),
                f"{share(every, 1.0, seconds):.0%}", f"{killed:.2g}",
            )  # fmt: skip
    return table


def to_loss() -> Table:
    """The third table."""
    headings = (
        "GPT",
        "bf16, s",
        "int4, s",
        "best at every step",
        "s",
        "local SGD, int4",
        "computing",
        "s",
        "over bf16",
        "over best",
    )
    table = Table(*headings, title="Seconds to the loss of bf16, 4 sites, 10 Mbit/s, 0.1 s per step")
    for name, (width, layers) in SIZES.items():
        with torch.device("meta"):
            model = build_model(ModelConfig("gpt", width=width, layers=layers), None)
        sent = {spec: plan(model, spec, world_size=4).sent_bytes_per_step for spec in TO_LOSS}
        every_step = {spec: steps * (0.1 + sent[spec] / (10 * MBIT)) for spec, steps in TO_LOSS.items()}
        best = min(every_step, key=every_step.__getitem__)
        rounds = seconds_of_rounds("int4", dict(model.named_parameters()), 4, Wan(4, 10 * MBIT, 10 * MBIT, 0.06))
        shares = {every: share(every, 0.1, rounds) for every in LOCAL_TO_LOSS}
        local = {every: steps * 0.1 / shares[every] for every, steps in LOCAL_TO_LOSS.items()}
        every = min(local, key=local.__getitem__)
        seconds = [every_step["bf16"], every_step["int4"], every_step[best], local[every]]
        bf16, int4, strong, here = (f"{each:,.0f}" for each in seconds)
        gains = [f"{each / local[every]:.1f}x" for each in (every_step["bf16"], every_step[best])]
        table.add_row(name, bf16, int4, best, strong, f"every {every}", f"{shares[every]:.0%}", here, *gains)
    return table


def main() -> None:
    """Show the tables."""
    for table in (bandwidths(), many(), to_loss()):
        Console(width=150).print(table)


if __name__ == "__main__":
    main()
