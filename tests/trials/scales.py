"""Trials of many buckets whose parameters have gradients of unlike sizes: no parameter is changed by the size of another.

Twice the same training, in the second one with one parameter's gradients made smaller on all ranks: its averages are smaller
by the same factor, and the others are the same to the bit. What each parameter is due is counted in its own units.
"""

from dataclasses import dataclass
from random import Random

import torch

from ..hooks.given import gradients
from .accounts import Account

EXACT, NARROW = 1e-5, 1e-2  # of a parameter's largest number; NARROW: two roundings to 8 bits
SPECS = {
    "int8": NARROW,
    "int8:error_feedback=true": EXACT,
    "int4": EXACT,
    "int4:rotate=true,error_feedback=false": 1.0,
    "int2": EXACT,
    "ternary": EXACT,
    "onebit:error_feedback=1": EXACT,
    "onebit:rotate=false,error_feedback=1": EXACT,
    "powersgd:rank=1,min_compression_rate=0": EXACT,
    "powersgd:rank=2,payload=int4,min_compression_rate=0": EXACT,
    "acp-powersgd:rank=1,min_compression_rate=0": EXACT,
    "bf16": NARROW,
    "none": EXACT,
    "topk:ratio=0.3": EXACT,
}
AMONG_ALL = "topk"  # chooses among all elements of a bucket
SMALLER = 2.0**-13
LARGE = (12, 14)  # fills a bucket
UNLIKE = 2.0**8  # times the averages of one parameter are larger than those of another


@dataclass(frozen=True)
class Trial:
    """`powers`: of two, by which each parameter's gradients are multiplied. `smaller`: the parameter that is made so."""

    seed: int
    world_size: int
    ours: bool
    spec: str
    shapes: tuple[tuple[int, ...], ...]
    powers: tuple[int, ...]
    smaller: int
    steps: int
    options: dict[str, object]


def drawn(seed):
    source = Random(f"scales {seed}")
    shapes = [tuple(source.randint(1, 14) for _ in range(source.randint(1, 3))) for _ in range(source.randint(4, 10))]
    shapes += [LARGE, LARGE]
    source.shuffle(shapes)
    powers = [source.randint(-20, 10) for _ in shapes]
    powers[:2] = [-20, 10]
    options = {"bucket_cap_mb": source.choice((0.0002, 0.0005)), "gradient_as_bucket_view": source.random() < 0.5}
    spec = source.choice(list(SPECS))
    source.shuffle(powers)
    smaller, steps = source.randrange(len(shapes)), source.randint(3, 5)
    world_size, ours = source.choice((2, 2, 3)), source.random() < 0.6
    return Trial(seed, world_size, ours, spec, tuple(shapes), tuple(powers), smaller, steps, options)


def train(rank, world_size, trial):
    """What does not hold; in words."""
    plain, found = trained(rank, trial, 1.0)
    scaled, more = trained(rank, trial, SMALLER)
    for step, (each, others) in enumerate(zip(plain, scaled, strict=True)):
        expected = [SMALLER * a if place == trial.smaller else a for place, a in enumerate(each)]
        places = [place for place, pair in enumerate(zip(expected, others, strict=True)) if not torch.equal(*pair)]
        if places and not trial.spec.startswith(AMONG_ALL):
            found.append(f"step {step}: p{trial.smaller} is smaller, and the averages of {places} are others")
    return ", ".join(found + more)


def trained(rank, trial, factor):
    """{parameter: average} of each step, and what does not hold. `factor`: of the gradients of one parameter."""
    account = Account(trial.ours, trial.spec, trial.shapes, **trial.options)
    factors = [2.0**power * (factor if place == trial.smaller else 1.0) for place, power in enumerate(trial.powers)]
    averages, found = [], []
    for step in range(trial.steps):
        given = [f * each for f, each in zip(factors, gradients(rank, step, trial.shapes), strict=True)]
        came, off = account.step(given)
        averages.append(came)
        found += [f"step {step}: p{p} is off by {by:.1g}" for p, by in enumerate(off) if not by <= SPECS[trial.spec]]
    largest = [float(max(each.abs().max() for each in came)) for came in zip(*averages, strict=True)]
    found += [] if max(largest) > UNLIKE * min(largest) else ["no parameter's averages are larger than another's"]
    found += [] if len(account.handle.stats().buckets) > 1 else ["all parameters are in one bucket"]
    account.handle.close()
    return averages, found
