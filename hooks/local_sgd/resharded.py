"""Saved states of sites with several ranks, as a site with another number of ranks continues from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...compress import Ranks
from ...ddp_core.memory.bucket_memory import BucketMemory
from .fragment import Fragment
from .inside import Inside
from .rounds import Rounds

State = Mapping[str, Any]


def of_this_rank(states: Sequence[State], setup: str, rounds: Rounds, inside: Inside) -> list[State]:
    """Return the states from which this rank continues, one of each site.

    They are those that its equals saved. From another number of ranks to a site they are made anew: parameters and residuals
    are joined along the axes along which they were cut, and cut for this rank. Raises ValueError where states are missing.
    """
    (size,) = sizes if len(sizes := {each["inside"][1] for each in states}) == 1 else (0,)
    by_rank = [[each for each in states if each["inside"][0] == rank] for rank in range(size)]
    if size == inside.size and by_rank[inside.rank]:
        return by_rank[inside.rank]
    if not size or not by_rank[0] or any(len(each) != len(by_rank[0]) for each in by_rank):
        given = ", ".join(sorted("{} of {}".format(*each["inside"]) for each in states))
        raise ValueError(
            f"the states are of ranks {given} of a site, and this is rank {inside.rank} of {inside.size}: give this rank's "
            "own state, or a list with the states of all ranks of the sites"
        )
    return [_cut_anew(site, setup, rounds, inside) for site in zip(*by_rank, strict=True)]


def _cut_anew(states: Sequence[State], setup: str, rounds: Rounds, inside: Inside) -> State:
    """Return this rank's state of a site, from those of all its ranks, in rank order."""
    axis, parameters = states[0]["axis"], dict[str, dict[str, Tensor]]()
    for part in rounds.fragments:
        layout = part.layout_with({name for each in states for name in each["parameters"]})
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            found = [each["parameters"][name] for each in states if name in each["parameters"]]
            for field in ("anchor", "momentum") if found else ():
                mine = inside.cut(name, torch.cat([each[field] for each in found], axis.get(name, 0)))
                parameters.setdefault(name, {})[field] = mine.reshape(shape) if mine.numel() else mine
    same = (
        states[0]["setup"].partition(", and ")[0] == setup.partition(", and ")[0]
    )  # but for the rank and what it froze
    owed = [_owed(states, part, index, rounds, inside) for index, part in enumerate(rounds.fragments)]
    changed = {"setup": setup if same else states[0]["setup"], "parameters": parameters, "unfrozen": {}, "owed": owed}
    return {**states[0], **changed}


def _owed(states: Sequence[State], part: Fragment, index: int, rounds: Rounds, inside: Inside) -> dict[str, Tensor]:
    """Return this rank's part of the residuals of a fragment, flat, by parameter name."""
    pieces: dict[str, list[Tensor]] = {}
    for state in states:
        shapes = {
            name: tuple(state["parameters"][name]["anchor"].shape) for name in part.names if name in state["parameters"]
        }
        for name, numbers in held_back(state, part, index, rounds, shapes).items():
            pieces.setdefault(name, []).append(numbers.view(shapes[name]))
    axis = states[0]["axis"]
    whole = {name: torch.cat(each, axis.get(name, 0)) for name, each in pieces.items()}
    return {name: mine.reshape(-1) for name, each in whole.items() if (mine := inside.cut(name, each)).numel()}


def held_back(
    state: State, part: Fragment, index: int, rounds: Rounds, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return the residuals that a state has of a fragment, flat, by name. `shapes`: of its parameters in that state."""
    if "owed" in state:
        return dict(state["owed"][index])
    memory = loaded(state, part, index, rounds, shapes)
    return {} if memory is None else dict(memory.held_back())


def loaded(
    state: State, part: Fragment, index: int, rounds: Rounds, shapes: Mapping[str, tuple[int, ...]]
) -> BucketMemory | None:
    """Return the compressor's memory of a fragment as it was saved; None before its first round."""
    if (entry := state["fragments"][index]) is None:
        return None
    ranks = Ranks(int(entry["world_size"]), int(entry["rank"]))
    place = replace(part.layout, names=tuple(shapes), shapes=tuple(shapes.values()), ranks=ranks)
    memory = BucketMemory(rounds.compressor, place, rounds.round)
    memory.load(entry["memory"])
    return memory
