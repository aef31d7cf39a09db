"""A checkpoint of local SGD: its contents, and the checks before it is loaded."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compress.state.tree import summed
from ...ddp_core.memory.bucket_memory import BucketMemory
from ..internet.late_sites import NEW, is_identity
from .fragment import Fragment
from .inside import Inside
from .resharded import held_back, loaded, of_this_rank
from .rounds import Rounds

logger = logging.getLogger(__name__)
FORMAT = 7  # of local SGD's states; see ddp_core/memory/checkpoint.py for DDP's, hooks/fsdp/state.py for FSDP2's
FIELDS = (
    "gradwire_local_steps",
    "setup",
    "training",
    "steps",
    "round",
    "parameters",
    "fragments",
    "buffers",
    "inside",
    "axis",
    "unfrozen",
)


def digest(value: object) -> str:
    """A few letters that tell two values apart."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def state_of(setup: str, steps: int, rounds: Rounds, inside: Inside, *, reset_due: bool) -> dict[str, Any]:
    """The state between two rounds; safe with `torch.load(weights_only=True)`.

    `reset_due`: the last round brought another model, which the next turn takes over.

    {"parameters": {name: {"anchor", "momentum", and "captured" where its round has ended and is not applied yet}},
    "fragments": [{"world_size", "rank", "memory": {name: {field: tensor}}} or None],
    "unfrozen": {name: what a parameter was that joins the next round}, "inside": [rank, ranks of the site],
    "axis": {name: along which its ranks have cut a parameter}, ...}
    """
    parameters: dict[str, dict[str, Tensor]] = {}
    for part in rounds.fragments:
        for field, flat in _fields(part, reset_due).items():
            for name, view in part.layout.views(flat).items():
                parameters.setdefault(name, {})[field] = view.clone()
    memories = [rounds.memories.get(index) for index in range(len(rounds.fragments))]
    return {
        "gradwire_local_steps": FORMAT,
        "setup": setup,
        "training": rounds.training,
        "steps": steps,
        "round": rounds.round,
        "parameters": parameters,
        "fragments": [None if memory is None else _saved(memory) for memory in memories],
        "buffers": rounds.buffers.clone(),
        "replaced": reset_due,
        "inside": [inside.rank, inside.size],
        "axis": dict(inside.axis),
        "unfrozen": {name: each.clone() for part in rounds.fragments for name, each in part.unfrozen.items()},
    }


def _fields(part: Fragment, reset_due: bool) -> dict[str, Tensor]:
    fields = {"anchor": part.anchor, "momentum": part.momentum}
    return fields if part.captured is None or reset_due else {**fields, "captured": part.captured}


def _saved(memory: BucketMemory) -> dict[str, Any]:
    ranks = memory.layout.ranks
    return {"world_size": ranks.world_size, "rank": ranks.rank, "memory": memory.save()}


def load(
    state: Mapping[str, Any] | Sequence[Mapping[str, Any]], setup: str, rounds: Rounds, inside: Inside, *, fresh: bool
) -> tuple[int, bool, bool]:
    """Take a state, or those of all sites. `fresh`: this site has made no step yet.

    Return the steps so far, whether the next turn takes another model over, and whether the sites are ahead of the state
    of a fresh site: then what they have in common stays. Raises ValueError, changing nothing, where one does not fit.
    """
    states = list(state) if isinstance(state, Sequence) else [state]
    if not states:
        raise ValueError("the list of states is empty")
    for each in states:
        _check_form(each)
    states = of_this_rank(states, setup, rounds, inside)
    for each in states:
        _check(each, setup, rounds)
    if len(counts := {each["round"] for each in states}) > 1:
        raise ValueError(f"the states were saved after different rounds: {sorted(counts)}")
    if len(trainings := {each["training"] for each in states}) > 1:
        raise ValueError(f"the states are of different trainings: {', '.join(sorted(trainings))}")
    if any(each["parameters"].keys() != states[0]["parameters"].keys() for each in states):
        raise ValueError("the states hold different parameters: give the states that all sites saved after one step")
    first = states[0]
    memories = [_memory(states, part, index, rounds) for index, part in enumerate(rounds.fragments)]
    ahead = fresh and rounds.training == first["training"] and rounds.round > first["round"]
    if ahead:  # LocalSteps took the others' model when it was created
        logger.warning(
            "the state is of round %d, and the sites are at %d: their model stays", first["round"], rounds.round
        )
    else:
        _put(states, rounds)
    rounds.memories = {index: memory for index, memory in enumerate(memories) if memory is not None}
    return first["steps"], bool(first.get("replaced")), ahead


def _put(states: Sequence[Mapping[str, Any]], rounds: Rounds) -> None:
    """Take what sites have in common from states that fit."""
    first = states[0]
    for part in rounds.fragments:
        part.captured = None
        part.join(first["parameters"], {})
        for field in first["parameters"][part.layout.names[0]]:
            flat = torch.cat([first["parameters"][name][field].reshape(-1) for name in part.layout.names])
            setattr(part, field, flat.to(part.layout.dtype))
        found = {name: value for each in reversed(states) for name, value in each["unfrozen"].items()}
        part.unfrozen = {name: value.clone() for name, value in found.items() if name in part.frozen}
    rounds.round, rounds.training = first["round"], first["training"]
    rounds.buffers.copy_(first["buffers"])
    rounds.lineage = rounds.digest()


def _check_form(state: Any) -> None:
    if not isinstance(state, Mapping) or (missing := [key for key in FIELDS if key not in state]):
        lacking = f": it lacks {', '.join(missing)}" if isinstance(state, Mapping) else f", but {type(state).__name__}"
        raise ValueError(f"this is no state of local steps{lacking}")
    if state["gradwire_local_steps"] != FORMAT:
        raise ValueError(
            f"the state was saved with gradwire_local_steps = {state['gradwire_local_steps']}, here it is {FORMAT}: load it "
            f"with the version of gradwire that wrote it"
        )
    if not all(isinstance(state[key], int) and state[key] >= least for key, least in (("steps", 0), ("round", NEW))):
        raise ValueError(
            f"the saved steps are a whole number from 0 on, and the round from {NEW} on; got {state['steps']!r} and "
            f"{state['round']!r}"
        )
    if not is_identity(str(state["training"])):
        raise ValueError(
            f"the identity of the saved training is 16 hexadecimal digits, of which the first is 0 to 3; got "
            f"{state['training']!r}"
        )


def _check(state: Any, setup: str, rounds: Rounds) -> None:
    if state["setup"] != setup:
        raise ValueError(f"the state was saved with {state['setup']}, here it is {setup}")
    buffers, here = state["buffers"], rounds.buffers
    if not isinstance(buffers, Tensor) or (buffers.shape, buffers.dtype) != (here.shape, here.dtype):
        told = f"{buffers.numel()} of {buffers.dtype}" if isinstance(buffers, Tensor) else type(buffers).__name__
        raise ValueError(
            f"the saved buffers of real numbers are not those of the model, {here.numel()} elements of {here.dtype}: got "
            f"{told}"
        )
    if not isinstance(state["fragments"], list) or len(state["fragments"]) != len(rounds.fragments):
        raise ValueError(f"the state has no list of {len(rounds.fragments)} fragments, as many as the model has here")
    for part in rounds.fragments:
        layout = part.layout_with(state["parameters"])
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            fields = state["parameters"].get(name, {})
            if not {"anchor", "momentum"} <= set(fields) <= {"anchor", "momentum", "captured"}:
                raise ValueError(
                    f"the state has an anchor and a momentum of parameter {name!r}, and a captured tensor at most; got "
                    f"{', '.join(map(repr, fields)) or 'nothing'}"
                )
            for field, numbers in fields.items():
                fits = isinstance(numbers, Tensor) and tuple(numbers.shape) == shape
                if not fits or not bool(numbers.isfinite().all()):
                    raise ValueError(
                        f"the saved {field!r} of parameter {name!r} is not of shape {shape}, or not finite"
                    )
        if len({frozenset(state["parameters"][name]) for name in layout.names}) > 1:
            raise ValueError(f"the state has different fields of the parameters {', '.join(layout.names)}")
        for name, value in state["unfrozen"].items():
            if name in part.frozen and (not isinstance(value, Tensor) or value.shape != part.value(name).shape):
                raise ValueError(f"the saved value of the unfrozen parameter {name!r} does not fit the parameter")


def _memory(states: Sequence[Mapping[str, Any]], part: Fragment, index: int, rounds: Rounds) -> BucketMemory | None:
    """Return the compressor's memory of a fragment: as saved, or from several sites the mean of their residuals."""
    layout = part.layout_with(states[0]["parameters"])
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    if all(each["fragments"][index] is None for each in states):
        return None
    if len(states) == 1 and "owed" not in states[0]:
        return loaded(states[0], part, index, rounds, shapes)
    fresh = BucketMemory(rounds.compressor, layout, rounds.round)
    held = summed(held_back(each, part, index, rounds, shapes) for each in states)
    fresh.carry_over({name: numbers / len(states) for name, numbers in held.items()})
    return fresh
