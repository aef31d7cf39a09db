"""The kinds of trials: how one is drawn from its number, what ranks do, and the laws of what they answer."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..hooks.local_sgd.sites import SHORT, Town
from ..ranks import RankError
from . import (
    backends,
    collectives,
    draw,
    fates,
    formats,
    halves,
    laws,
    local,
    meshes,
    overlapped,
    pauses,
    programs,
    saving,
    scales,
    shards,
    sites,
    tasks,
    tokens,
)
from .rank import train

SECONDS = 60


@dataclass(frozen=True)
class Kind:
    """`undergone(pool, trial, scale)`: sentences on laws that do not hold, and messages that do not say where."""

    drawn: Callable[[int], Any]
    undergone: Callable[[Any, Any, float], tuple[list[str], list[str]]]


def ddp(pool, trial, scale):
    """A training with gradient compression; one with a mishap ends in errors."""
    if trial.mishap is not None:
        answers = pool.run(fates.undergo, trial.world_size, trial, timeout=2 * SECONDS * scale, expect_errors=True)
        return fates.broken(trial, answers, scale)
    return alike(train, laws.broken, pool, trial, scale)


def alike(function, broken, pool, trial, scale):
    """What all ranks are to come through."""
    try:
        answers = pool.run(function, trial.world_size, trial, timeout=2 * SECONDS * scale)
    except RankError as error:
        return [str(error)], []
    return broken(trial, answers), []


def told(trial, answers):
    """Sentences on all ranks where something is wrong."""
    return [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]


def of_sites(module, pool, trial, scale):
    """Sites that may not come to the end; what the others have is in a folder."""
    town = Town(relay=getattr(trial, "relay", False))
    with tempfile.TemporaryDirectory() as folder:
        given = trial, town.address, folder, SHORT * scale
        answers = pool.run(module.train, trial.world_size, *given, timeout=2 * SECONDS * scale, expect_errors=True)
        return module.broken(trial, answers, folder, SHORT * scale), []


KINDS = {
    "ddp": Kind(draw.drawn, ddp),
    "hosts": Kind(draw.on_hosts, ddp),
    "options": Kind(draw.with_feedback_options, ddp),
    "overlap": Kind(overlapped.drawn, partial(alike, overlapped.train, overlapped.broken)),
    "local": Kind(local.drawn, partial(of_sites, local)),
    "sites": Kind(sites.drawn, partial(of_sites, sites)),
    "pauses": Kind(pauses.drawn, partial(of_sites, pauses)),
    "programs": Kind(programs.drawn, programs.undergone),
    "backends": Kind(backends.drawn, backends.undergone),
    "collectives": Kind(collectives.drawn, collectives.undergone),
    "shards": Kind(shards.drawn, partial(alike, shards.train, shards.broken)),
    "meshes": Kind(meshes.drawn, partial(alike, meshes.train, told)),
    "saves": Kind(saving.drawn, partial(alike, saving.train, told)),
    "halves": Kind(halves.drawn, partial(alike, halves.train, told)),
    "scales": Kind(scales.drawn, partial(alike, scales.train, told)),
    "formats": Kind(formats.drawn, partial(alike, formats.train, told)),
    "tokens": Kind(tokens.drawn, partial(alike, tokens.train, told)),
    "tasks": Kind(tasks.drawn, partial(alike, tasks.train, told)),
}
