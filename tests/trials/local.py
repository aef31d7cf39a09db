"""Trials of `gradwire.LocalSteps`: as written down plainly in float64, and one model whatever befalls a site."""

import itertools
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from random import Random

import torch

from gradwire import LocalSteps

from ..ddp_core.nets import Batch
from ..hooks.local_sgd.sites import BUSY, Town
from ..ranks import LostRank, RankFailure
from . import models
from .gradients import near
from .models import Headed, loss_of

LOSSY = (
    "bf16",
    "int8",
    "int4",
    "topk:ratio=0.3",
    "onebit:block=8,error_feedback=1",
    "powersgd:rank=1",
    "int4:error_feedback=0.9",
)
TOLERANCES = {"Single": 1e-3, "Brief": 0.2}  # of parts in narrower types; what follows them is as far off
TIGHT = 1e-8


@dataclass(frozen=True)
class Trial:
    """A training of sites. `meets`: at a rendezvous, not in a process group. `mishap`: None, kill or late; of the last site.

    `resumes`: the step after which all go on from what they have saved, or None. `outer`: (lr, momentum, nesterov).
    """

    seed: int
    world_size: int
    parts: tuple[str, ...]
    spec: str
    every: int
    fragments: int
    overlap: bool
    outer: tuple[float, float, bool]
    steps: int
    momentum: float
    meets: bool
    mishap: str | None
    resumes: int | None

    @property
    def options(self):
        """Of LocalSteps."""
        rate, momentum, nesterov = self.outer
        outer = f"{'nesterov' if nesterov else 'sgd'}:lr={rate},momentum={momentum}"
        common = {"every": self.every, "fragments": self.fragments, "overlap": self.overlap}
        return {**common, "outer": outer, "compressor": self.spec}


def drawn(seed):
    source = Random(f"local {seed}")
    every = source.randint(1, 6)
    meets = source.random() < 0.4
    mishap = source.choice((None, None, "kill", "late")) if meets else None
    steps = source.randint(4, 16)
    resumes = source.randint(1, steps - 1) if mishap is None and source.random() < 0.3 else None
    parts = [name for name in models.PARTS if name not in models.SPARSE]
    sites = 3 if mishap else source.choice((2, 2, 3))
    parts = tuple(source.choices(parts, k=source.randint(1, 3)))
    spec, fragments = source.choice(("none", source.choice(LOSSY))), source.randint(1, min(every, 3))
    overlap = source.random() < 0.6
    outer = (source.choice((1.0, 0.7, 0.3)), source.choice((0.0, 0.5, 0.9)), source.random() < 0.5)
    momentum = source.choice((0.0, 0.9))
    return Trial(seed, sites, parts, spec, every, fragments, overlap, outer, steps, momentum, meets, mishap, resumes)


class Site:
    """A model that trains alone between rounds."""

    def __init__(self, trial, site):
        self.trial, self.site = trial, site
        self.network = Headed(trial.parts, trial.seed)
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.03, momentum=trial.momentum)

    def descend(self, step):
        """One step on a batch of this site's own."""
        self.optimizer.zero_grad()
        loss_of(self.network(Batch.drawn(self.site, step, 0)), True).backward()
        self.optimizer.step()

    def state_dict(self):
        return {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])

    @property
    def numbers(self):
        """{name: trained parameter}, real ones."""
        return {name: real(p) for name, p in self.network.named_parameters() if p.requires_grad}


def real(parameter):
    detached = parameter.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached


def meeting_place(trial, rank, address, limit, name):
    """Where sites meet, if they do not share a process group."""
    place = {"limit": timedelta(seconds=limit), "prefix": name}
    return {"at": Town.at(address, trial.world_size, f"site {rank}", **place)} if trial.meets else {}


def train(rank, world_size, trial, address, folder, limit):
    """Leave this site's parameters in the folder, and where a simulation has others. `limit`: seconds of a round."""
    site, local = Site(trial, rank), None
    for life, (first, last) in enumerate(lives(trial)):
        saved = None if local is None else torch_copy((site.state_dict(), local.state_dict()))
        if local is not None:
            local.close()
        if saved is not None:
            site = Site(trial, rank)
            site.load_state_dict(saved[0])
        at = meeting_place(trial, rank, address, limit, f"{trial.seed} {life} {os.path.basename(folder)}")
        local = LocalSteps(site.network, site.optimizer, **at, **trial.options)
        if saved is not None:
            site.load_state_dict(saved[0])  # what the others have is not what this one has trained since
            local.load_state_dict(saved[1])
        longest = until(trial, site, local, (first, last), limit, f"{folder}/woken")
    parts = [list(part.parameters) for part in local._parts]
    local.finish()
    found = {name: numbers.clone() for name, numbers in site.numbers.items()}
    off = differing(trial, found, parts) if trial.spec == "none" and trial.mishap is None and rank == 0 else ""
    torch.save((found, longest, off), f"{folder}/{rank}")


def lives(trial):
    ends = [0, *([] if trial.resumes is None else [trial.resumes]), trial.steps]
    return list(itertools.pairwise(ends))


def torch_copy(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: torch_copy(each) for key, each in value.items()}
    return type(value)(map(torch_copy, value)) if isinstance(value, list | tuple) else value


def until(trial, site, local, steps, limit, woken):
    """Train; with a mishap until sites have had so many rounds, which all count alike. The seconds of the longest step."""
    longest, rounds = 0.0, max(6, trial.steps // local.spacing)
    if trial.mishap is None:
        for step in range(*steps):
            site.descend(step)
        return longest
    last = site.site == trial.world_size - 1
    while local.round < rounds:
        if last and local.steps == trial.steps // 3:
            befall(trial.mishap, limit, woken)
        while trial.mishap == "late" and not last and local.round >= rounds - 3 and not os.path.exists(woken):
            time.sleep(0.01)  # or all is over before it is back, and it goes on alone
        began = time.monotonic()
        time.sleep(0.02)
        site.descend(local.steps)
        longest = max(longest, time.monotonic() - began)
    return longest


def befall(mishap, limit, woken):
    """This site is killed, or sleeps for longer than the others wait for it, and leaves a file when it is back."""
    if mishap == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.7 * limit)
    with open(woken, "w"):
        pass


def differing(trial, found, parts):
    """What a plainly written simulation of all sites has otherwise."""
    sites = simulated(trial, parts)
    tolerance = max([TIGHT, *(TOLERANCES.get(part, TIGHT) for part in trial.parts)])
    names = [n for n, numbers in found.items() if not near(sites[n], numbers, tolerance)]
    return ", ".join(f"{name} by {float((found[name].double() - sites[name]).abs().max()):.2g}" for name in names)


def simulated(trial, parts):
    """{name: parameter} that all sites end with, in float64: SlowMo by fragments, with delayed averages."""
    sites = [Site(trial, site) for site in range(trial.world_size)]
    anchor = {name: numbers.double().clone() for name, numbers in sites[0].numbers.items()}
    speed = {name: torch.zeros_like(numbers) for name, numbers in anchor.items()}
    flight, turn, spacing = None, 0, trial.every // len(parts)

    def capture(names):
        return names, [{name: site.numbers[name].double().clone() for name in names} for site in sites]

    def apply(names, captured):
        rate, momentum, nesterov = trial.outer
        for name in names:
            mean = sum(anchor[name] - each[name] for each in captured) / len(sites)
            speed[name] = momentum * speed[name] + mean
            anchor[name] = anchor[name] - rate * (mean + momentum * speed[name] if nesterov else speed[name])
            for site, each in zip(sites, captured, strict=True):
                here = site.numbers[name]
                here.copy_(here.double() - each[name] + anchor[name])

    for step in range(trial.steps):
        for site in sites:
            site.descend(step)
        if (step + 1) % spacing == 0:
            if flight is not None:
                apply(*flight)
            flight, turn = capture(parts[turn % len(parts)]), turn + 1
            if not trial.overlap:
                apply(*flight)
                flight = None
    if flight is not None:
        apply(*flight)
    for _ in parts:
        apply(*capture(parts[turn % len(parts)]))
        turn += 1
    return anchor


def broken(trial, answers, folder, limit):
    """Sentences on what does not hold: of the answers of ranks, and of what they have left."""
    befell = {"kill": isinstance(answers[-1], LostRank), "late": os.path.exists(f"{folder}/woken")}
    found = [] if befell.get(trial.mishap, True) else [f"nothing befell the last site: no {trial.mishap} took place"]
    for rank, answer in enumerate(answers):
        killed = trial.mishap == "kill" and rank == trial.world_size - 1
        if isinstance(answer, LostRank) and not killed:
            found.append(f"site {rank} {answer.fate}")
        if isinstance(answer, RankFailure) and trial.mishap != "kill":  # the pool's own group has lost a rank
            found.append(f"site {rank}: {answer.traceback}")
    survivors = [rank for rank in range(trial.world_size) if os.path.exists(f"{folder}/{rank}")]
    expected = trial.world_size - (trial.mishap == "kill")
    if len(survivors) < expected:
        return [*found, f"only sites {survivors} came to the end"]
    left = {rank: torch.load(f"{folder}/{rank}") for rank in survivors}
    off = left[survivors[0]][2]
    found += unlike({rank: numbers for rank, (numbers, *_) in left.items()})
    late = {rank: longest for rank, (_, longest, _) in left.items() if longest > limit + BUSY}
    found += [f"site {rank} took {longest:.1f} s for a step" for rank, longest in late.items()]
    return [*found, f"a simulation has others: {off}"] if off else found


def unlike(left):
    """Sentences on sites that do not end with the first one's parameters. `left`: those of each site."""
    first = left[min(left)] if left else {}
    names = {site: [name for name in first if not torch.equal(first[name], own[name])] for site, own in left.items()}
    return [f"site {site} ends with other parameters: {', '.join(each)}" for site, each in names.items() if each]
