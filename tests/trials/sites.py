"""Trials of sites that come late, are stopped, cut off or killed, whose clock jumps, or that return when all is over.

They take the others' model, or raise; the others end with one model. Each trial shows that its mishap took place: a trial in
which nothing befell anybody fails.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from random import Random
from unittest.mock import patch

import torch

from gradwire import LocalSteps
from gradwire.hooks.internet.background import Background

from ..hooks.local_sgd.sites import BUSY, Town
from ..ranks import LostRank, RankFailure
from ..wan import Direction, Wan
from . import local
from .local import Site

SUDDEN = ("kill", "hold", "jump", "cut up", "cut down")  # at the beginning of a step
MISHAPS = ("new", "stop", "return", "after", *SUDDEN)
HOUR, FAST = 3600.0, 1e9  # seconds; bytes per second
ENDED = ("missed its end", "only 1 of 2 sites came")
STRUCK = "struck"  # a file that shows that the mishap took place
PATIENCE = 100  # seconds for which a site awaits an event


@dataclass(frozen=True)
class Trial:
    """A training of sites that meet, or connect through a relay. `mishap` befalls the last one, which

    new: comes when the others have had a round; stop: is stopped for longer than the others wait for it; return: is stopped
    until the others have ended; after: comes when they have. `moment`: seconds after its start at which it is stopped.
    kill; hold: its GIL is held; jump: its clocks jump by an hour; cut up, cut down: nothing passes on its line to the
    rendezvous in one direction. These come after round `round`, and last for `share` of a round's limit: the others wait
    for a third.
    """

    training: local.Trial
    mishap: str
    moment: float
    relay: bool
    round: int
    share: float

    @property
    def world_size(self):
        return self.training.world_size


def drawn(seed):
    source = Random(f"sites {seed}")
    training = replace(local.drawn(source.randint(0, 10**6)), world_size=3, meets=True, mishap=None, resumes=None)
    mishap, moment, relay = source.choice(MISHAPS), round(source.uniform(0.0, 0.6), 3), source.random() < 0.5
    return Trial(training, mishap, moment, relay, source.randint(1, 3), source.choice((0.1, 0.4, 0.7)))


def train(rank, world_size, trial, address, folder, limit):
    """Leave this site's parameters in the folder, and the seconds of its longest step."""
    last, events = rank == world_size - 1, Path(folder)
    if last and trial.mishap in ("new", "after"):
        await_file(events / ("begun" if trial.mishap == "new" else "ended"))
        if trial.mishap == "after":
            (events / STRUCK).touch()
        (events / "woken").touch()  # before it joins, for which the others have to come to a meeting
    site = Site(trial.training, rank)
    comes_at_start = trial.mishap not in ("new", "after")
    place = {"limit": timedelta(seconds=limit), "prefix": f"{trial.training.seed} {os.path.basename(folder)}"}
    if last and trial.mishap == "after":
        place["start"] = timedelta(seconds=1)
    with contextlib.ExitStack() as stack:
        if last:
            stack.callback((events / "woken").touch)  # however it ends: the others do not wait for it any more
        line = stack.enter_context(line_to(address)) if last and trial.mishap.startswith("cut") else None
        near = address if line is None else line.address
        at = Town.at(near, world_size if comes_at_start else world_size - 1, f"site {rank}", **place)
        steps = LocalSteps(site.network, site.optimizer, at=at, **trial.training.options)
        helper = befall(trial, events, limit) if last else None
        strike = Strike(trial, events, limit, line, stack) if last and trial.mishap in SUDDEN else None
        longest = until(trial, site, steps, events, last, strike)
        steps.finish()
        if trial.mishap == "new" and {2, 3} <= {stats.sites for stats in steps.history}:
            (events / STRUCK).touch()
        torch.save((site.numbers, longest), events / str(rank))
        (events / "ended").touch()
        if helper is not None:
            helper.wait(PATIENCE)


@contextlib.contextmanager
def line_to(address):
    """A line to the rendezvous that can be cut."""
    host, port = address.split(":")
    background, line = Background(), Wan(host, int(port), Direction(FAST), Direction(FAST))
    line.address = f"{host}:{background.run(line.open(), PATIENCE)}"
    yield line
    background.close()


@dataclass
class Strike:
    """What befalls this site suddenly, once."""

    trial: Trial
    events: Path
    limit: float
    line: Wan | None
    stack: contextlib.ExitStack
    done: bool = False

    def at(self, number):
        """Strike if so many rounds are over."""
        if self.done or number < self.trial.round:
            return
        self.done, seconds = True, self.trial.share * self.limit
        match self.trial.mishap:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hold":
                began = time.monotonic()
                ctypes.PyDLL(None).poll(None, 0, int(1000 * seconds))  # PyDLL keeps the GIL
                self.over(struck=time.monotonic() - began >= 0.9 * seconds)
            case "jump":
                before = time.monotonic()
                for clock, jump in (("monotonic", HOUR), ("time", -HOUR)):
                    self.stack.enter_context(patch.object(time, clock, jumped(getattr(time, clock), jump)))
                self.over(struck=time.monotonic() - before >= HOUR)
            case "cut up" | "cut down":
                direction = self.line.up if self.trial.mishap == "cut up" else self.line.down
                direction.cut = True
                timer = threading.Timer(seconds, self.heal, [direction])
                timer.start()
                self.stack.callback(timer.cancel)

    def heal(self, direction):
        direction.cut = False
        self.over(struck=direction.held > 0)

    def over(self, *, struck):
        """Let the others go on to the end. `struck`: the mishap took place."""
        if struck:
            (self.events / STRUCK).touch()
        (self.events / "woken").touch()


def jumped(clock, seconds):
    """A clock that is off by so many seconds."""
    return lambda: clock() + seconds


def befall(trial, events, limit):
    """Begin what befalls the last site; None, or a process that stops this one."""
    if trial.mishap not in ("stop", "return"):
        return None
    ended = f"n=0; while [ ! -e {events}/ended ] && [ $n -lt {10 * PATIENCE} ]; do sleep 0.1; n=$((n + 1)); done"
    meanwhile = f"sleep {0.7 * limit}" if trial.mishap == "stop" else ended
    pid = os.getpid()
    stopped = f"kill -STOP {pid} && [ ! -e {events}/ended ] && touch {events}/{STRUCK}"
    script = f"sleep {trial.moment}; {stopped}; {meanwhile}; kill -CONT {pid}; touch {events}/woken"
    return subprocess.Popen(["sh", "-c", script])


def await_file(path):
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.01)


def until(trial, site, steps, events, last, strike):
    """Train until sites have had so many rounds, and one with whoever is new, which all count alike; longest seconds."""
    longest, rounds = 0.0, max(6, trial.training.steps // steps.spacing)
    while steps.round < rounds or (trial.mishap == "new" and all(stats.sites < 3 for stats in steps.history)):
        if steps.round >= 1:
            (events / "begun").touch()
        if not last and trial.mishap not in ("after", "kill") and steps.round >= rounds - 3:
            await_file(events / (STRUCK if trial.mishap == "return" else "woken"))  # or all is over before
        if strike is not None:
            strike.at(steps.round)
        began = time.monotonic()
        time.sleep(0.02)
        site.descend(steps.steps)
        longest = max(longest, time.monotonic() - began)
    return longest


def broken(trial, answers, folder, limit):
    """Sentences on what does not hold: of the answers of ranks, and of what they have left."""
    *others, last = range(trial.world_size)
    left = {rank: torch.load(path) for rank in (*others, last) if (path := Path(folder, str(rank))).exists()}
    lost = [rank for rank, answer in enumerate(answers) if isinstance(answer, LostRank)]
    killed = trial.mishap == "kill" and last in lost
    struck = killed or Path(folder, STRUCK).exists()
    found = [] if struck else [f"nothing befell site {last}: no {trial.mishap} took place"]
    found += [f"site {rank} {answers[rank].fate}" for rank in lost if not (killed and rank == last)]
    found += [f"site {rank} did not come to the end: {told(answers[rank])}" for rank in others if rank not in left]
    if last not in left and not killed and not any(words in told(answers[last]) for words in ENDED):
        found.append(f"site {last} neither ends nor says that the others have ended: {told(answers[last])}")
    if last in left and trial.mishap == "after":
        found.append(f"site {last} trained alone when the others had ended")
    found += local.unlike({rank: numbers for rank, (numbers, _) in left.items()})
    late = {rank: longest for rank, (_, longest) in left.items() if rank != last and longest > limit + BUSY}
    return [*found, *(f"site {rank} took {longest:.1f} s for a step" for rank, longest in late.items())]


def told(answer):
    return answer.traceback if isinstance(answer, RankFailure) else str(answer)
