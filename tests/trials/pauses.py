"""Trials of sites that pause, each once and for a while of its own, as for an evaluation or a checkpoint: all end alike."""

import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from random import Random

import torch

from gradwire import LocalSteps

from ..hooks.local_sgd.sites import Town
from . import local
from .local import Site
from .sites import await_file, told

SITES, ROUNDS = 3, 6
SHORTEST, LONGEST = 0.05, 0.9  # times the limit of a round: a minority waits for as long
LONG = 0.4  # for a third of the limit sites wait that are half of the last meeting's


@dataclass(frozen=True)
class Trial:
    """`pauses`: of each site, (round before which it pauses, share of a round's limit for which it does)."""

    training: local.Trial
    relay: bool
    pauses: tuple[tuple[int, float], ...]

    @property
    def world_size(self):
        return self.training.world_size


def drawn(seed):
    source = Random(f"pauses {seed}")
    training = replace(local.drawn(source.randint(0, 10**6)), world_size=SITES, meets=True, mishap=None, resumes=None)
    shares = [round(source.uniform(SHORTEST, LONGEST), 2) for _ in range(SITES)]
    shares[source.randrange(SITES)] = round(source.uniform(LONG, LONGEST), 2)
    pauses = tuple((source.randint(1, ROUNDS // 2), share) for share in shares)
    return Trial(training, source.random() < 0.5, pauses)


def train(rank, world_size, trial, address, folder, limit):
    """Leave this site's parameters and the seconds of its pause in the folder."""
    site, (before, share), paused = Site(trial.training, rank), trial.pauses[rank], 0.0
    place = {"limit": timedelta(seconds=limit), "prefix": f"{trial.training.seed} {os.path.basename(folder)}"}
    at = Town.at(address, world_size, f"site {rank}", **place)
    steps = LocalSteps(site.network, site.optimizer, at=at, **trial.training.options)
    while steps.round < ROUNDS:
        if steps.round >= before and not paused:
            began = time.monotonic()
            time.sleep(share * limit)
            paused = time.monotonic() - began
            Path(folder, f"paused {rank}").touch()
        if steps.round >= ROUNDS // 2:
            for other in range(world_size):
                await_file(Path(folder, f"paused {other}"))  # or all is over before it is back
        site.descend(steps.steps)
    steps.finish()
    torch.save((site.numbers, paused), f"{folder}/{rank}")


def broken(trial, answers, folder, limit):
    """Sentences on what does not hold: all sites come to the end with one model, and each has paused."""
    left = {rank: torch.load(path) for rank in range(SITES) if (path := Path(folder, str(rank))).exists()}
    found = [f"site {rank} did not come to the end: {told(answers[rank])}" for rank in range(SITES) if rank not in left]
    found += local.unlike({rank: numbers for rank, (numbers, _) in left.items()})
    short = {rank: paused for rank, (_, paused) in left.items() if paused < trial.pauses[rank][1] * limit}
    return [*found, *(f"site {rank} paused for {paused:.2f} s alone" for rank, paused in short.items())]
