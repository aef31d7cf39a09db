"""Trials of gradients that are divided after backward, by the number of each step's tokens, with `handle.rescale`.

The averages are those of the same factor in the loss, to the bit, since factors are powers of two. Without `rescale` they
are others: the division took place, and the residual has kept something of it.
"""

from dataclasses import dataclass
from random import Random

import torch

from ..hooks.given import gradients
from .accounts import SHAPES, Account

SPECS = (
    "int4",
    "int8:error_feedback=true",
    "int4:rotate=true",
    "int4:error_feedback=0.8",
    "onebit:error_feedback=1",
    "topk:ratio=0.2",
    "powersgd:rank=1,min_compression_rate=0",
    "acp-powersgd:rank=1,min_compression_rate=0",
    "int4:residual_bits=8",
    "topk:ratio=0.2,residual_bits=16",
    "int4:momentum=0.5",
)


@dataclass(frozen=True)
class Trial:
    """`factors`: one over the tokens of each step, about."""

    seed: int
    world_size: int
    ours: bool
    spec: str
    factors: tuple[float, ...]
    bucket_cap_mb: float


def drawn(seed):
    source = Random(f"tokens {seed}")
    factors = [2.0 ** -source.randint(0, 6) for _ in range(source.randint(3, 7))]
    factors[1] = factors[0] * source.choice((64.0, 1 / 64))
    world_size, ours = source.choice((2, 2, 3)), source.random() < 0.6
    return Trial(seed, world_size, ours, source.choice(SPECS), tuple(factors), source.choice((0.0005, 25)))


def train(rank, world_size, trial):
    """Where averages differ from those with the factor in the loss; in words."""
    in_loss, rescaled, alone = (trained(rank, trial, way) for way in ("in the loss", "rescaled", "after backward"))
    differing = [step for step, pair in enumerate(zip(in_loss, rescaled, strict=True)) if not torch.equal(*pair)]
    found = [f"steps {differing} are not as with the factor in the loss"] if differing else []
    if all(map(torch.equal, in_loss, alone)):
        found.append("nothing befell the residual: without rescale the averages are the same")
    return ", ".join(found)


def trained(rank, trial, way):
    """The averages of each step, flat, as an optimizer takes them."""
    account = Account(trial.ours, trial.spec, SHAPES, bucket_cap_mb=trial.bucket_cap_mb)
    before, averages = None, []
    for step, factor in enumerate(trial.factors):
        if way == "rescaled" and before is not None:
            account.handle.rescale(before / factor)
        first, later = (factor, 1.0) if way == "in the loss" else (1.0, factor)
        came = account.average([first * each for each in gradients(rank, step, SHAPES)])
        averages.append(later * torch.cat([each.flatten() for each in came]))
        before = factor
    account.handle.close()
    return averages
