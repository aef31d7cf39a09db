"""Trials of sites that come late, are stopped, or return when all is over: they take the others' model, or raise."""

import os
import subprocess
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from random import Random

import torch

from gradwire import LocalSteps

from ..hooks.local_sgd.sites import BUSY, Town
from ..ranks import LostRank, RankFailure
from . import local
from .local import Site

MISHAPS = ("new", "stop", "return", "after")
ENDED = ("missed its end", "only 1 of 2 sites came")
PATIENCE = 100  # seconds for which a site awaits an event


@dataclass(frozen=True)
class Trial:
    """A training of sites that meet, or connect through a relay. `mishap` befalls the last one, which

    new: comes when the others have had a round; stop: is stopped for longer than the others wait for it; return: is stopped
    until the others have ended; after: comes when they have. `moment`: seconds after its start at which it is stopped.
    """

    training: local.Trial
    mishap: str
    moment: float
    relay: bool

    @property
    def world_size(self):
        return self.training.world_size


def drawn(seed):
    """The trial of a seed."""
    source = Random(f"sites {seed}")
    training = replace(local.drawn(source.randint(0, 10**6)), world_size=3, meets=True, mishap=None, resumes=None)
    return Trial(training, source.choice(MISHAPS), round(source.uniform(0.0, 0.6), 3), source.random() < 0.5)


def train(rank, world_size, trial, address, folder, limit):
    """Leave this site's parameters in the folder, and the seconds of its longest step."""
    last, events = rank == world_size - 1, Path(folder)
    if last and trial.mishap in ("new", "after"):
        await_file(events / ("begun" if trial.mishap == "new" else "ended"))
        (events / "woken").touch()  # before it joins, for which the others have to come to a meeting
    site = Site(trial.training, rank)
    comes_at_start = trial.mishap in ("stop", "return")
    place = {"limit": timedelta(seconds=limit), "prefix": f"{trial.training.seed} {os.path.basename(folder)}"}
    if last and trial.mishap == "after":
        place["start"] = timedelta(seconds=1)
    at = Town.at(address, world_size if comes_at_start else world_size - 1, f"site {rank}", **place)
    steps = LocalSteps(site.network, site.optimizer, at=at, **trial.training.options)
    helper = befall(trial, events, limit) if last else None
    longest = until(trial, site, steps, events, last)
    steps.finish()
    torch.save((site.numbers, longest), events / str(rank))
    (events / "ended").touch()
    if helper is not None:
        helper.wait(PATIENCE)


def befall(trial, events, limit):
    """Begin what befalls the last site; None, or a process that stops this one."""
    if trial.mishap not in ("stop", "return"):
        return None
    ended = f"n=0; while [ ! -e {events}/ended ] && [ $n -lt {10 * PATIENCE} ]; do sleep 0.1; n=$((n + 1)); done"
    meanwhile = f"sleep {0.7 * limit}" if trial.mishap == "stop" else ended
    pid = os.getpid()
    script = f"sleep {trial.moment}; kill -STOP {pid}; {meanwhile}; kill -CONT {pid}; touch {events}/woken"
    return subprocess.Popen(["sh", "-c", script])


def await_file(path):
    """Wait for an event of another site."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.01)


def until(trial, site, steps, events, last):
    """Train until sites have had so many rounds, which all count alike; the seconds of the longest step."""
    longest, rounds = 0.0, max(6, trial.training.steps // steps.spacing)
    while steps.round < rounds:
        if steps.round >= 1:
            (events / "begun").touch()
        if not last and trial.mishap in ("new", "stop") and steps.round >= rounds - 3:
            await_file(events / "woken")  # or all is over before it is back
        began = time.monotonic()
        time.sleep(0.02)
        site.descend(steps.steps)
        longest = max(longest, time.monotonic() - began)
    return longest


def broken(trial, answers, folder, limit):
    """Sentences on what does not hold: of the answers of ranks, and of what they have left."""
    *others, last = range(trial.world_size)
    left = {rank: torch.load(path) for rank in (*others, last) if (path := Path(folder, str(rank))).exists()}
    found = [f"site {rank} {answer.fate}" for rank, answer in enumerate(answers) if isinstance(answer, LostRank)]
    found += [f"site {rank} did not come to the end: {told(answers[rank])}" for rank in others if rank not in left]
    if last not in left and not any(words in told(answers[last]) for words in ENDED):
        found.append(f"site {last} neither ends nor says that the others have ended: {told(answers[last])}")
    if last in left and trial.mishap == "after":
        found.append(f"site {last} trained alone when the others had ended")
    first = left.get(0, ({}, 0.0))[0]
    for rank, (numbers, longest) in left.items():
        names = [name for name in first if not torch.equal(first[name], numbers[name])]
        found += [f"site {rank} ends with other parameters: {', '.join(names)}"] if names else []
        found += [f"site {rank} took {longest:.1f} s for a step"] if rank != last and longest > limit + BUSY else []
    return found


def told(answer):
    """What a rank raised."""
    return answer.traceback if isinstance(answer, RankFailure) else str(answer)
