"""Trials of collectives that a loop calls by itself, on groups that `compress_group` compresses.

Without a mishap, random sequences on three groups are held against float64. A rank that dies is an error of all others,
and options that differ are one of all ranks. The answers show that the mishap took place.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from random import Random

import torch
import torch.distributed as dist

import gradwire

from ..hooks.collectives.test_compress_group import LIMIT, sequences
from ..ranks import LostRank, RankError

SECONDS = 60
DEAD = "died with exit code 3"
OPTIONS = (
    {"min_bytes": LIMIT},
    {"min_bytes": LIMIT + 1},
    {"min_bytes": LIMIT, "compressor": "bf16"},
    {"min_bytes": LIMIT, "compressor": "int8:block=64"},
    {"min_bytes": LIMIT, "gather": "bf16"},
)


@dataclass(frozen=True)
class Trial:
    """`mishap`: "dies" after some `calls`, or "differs" by its `options` (their place); of the rank `whose`."""

    seed: int
    world_size: int
    mishap: str | None
    whose: int
    calls: int
    options: int


def drawn(seed):
    source = Random(f"collectives {seed}")
    world_size, mishap = source.choice((2, 2, 3)), source.choice((None, None, "dies", "differs"))
    whose, calls = source.randrange(world_size), source.randint(1, 5)
    return Trial(seed, world_size, mishap, whose, calls, source.randrange(1, len(OPTIONS)))


def dying(rank, world_size, trial):
    """Calls of which a rank makes only so many. What it waits for has its size in its error."""
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=10))
    gradwire.compress_group(group, **OPTIONS[0])
    for number in range(trial.calls + 1):
        if number == trial.calls and rank == trial.whose:
            os._exit(3)
        dist.all_reduce(torch.ones(2000 + number), group=group)


def differing(rank, world_size, trial):
    gradwire.compress_group(None, **OPTIONS[trial.options if rank == trial.whose else 0]).close()


def undergone(pool, trial, scale):
    limit = 2 * SECONDS * scale
    if trial.mishap is None:
        try:
            pool.run(sequences, trial.world_size, trial.seed, timeout=limit)
        except RankError as error:
            return [str(error)], []
        return [], []
    function, said = {
        "dies": (dying, f"the all-reduce of {4 * (2000 + trial.calls)} bytes"),
        "differs": (differing, "pass the same on all ranks"),
    }[trial.mishap]
    answers = pool.run(function, trial.world_size, trial, timeout=limit, expect_errors=True)
    dead = trial.whose if trial.mishap == "dies" else None
    found = [] if dead is None or answers[dead] == LostRank(dead, DEAD) else [f"rank {dead} did not die"]
    messages = {rank: getattr(each, "message", "nothing") for rank, each in enumerate(answers) if rank != dead}
    return [*found, *(f"rank {r} raised {text!r}" for r, text in messages.items() if said not in text)], []
