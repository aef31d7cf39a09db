"""Checkpoints under DDP: the saved format and its checks, the states of all ranks, and those for other numbers of ranks."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compress import Compressor, Layout, Ranks, specification
from ...compress.builder.build import fingerprint
from ...compress.state import tree as states
from ...compress.state.shares import ranks_given
from ...compress.state.tensors import FIRST, PART
from ...compress.state.tree import Entries, summed
from ..buckets.grad_bucket import axis_order, grad_dtype, layout_of, plain_names
from .axis_orders import Move, moved
from .bucket_memory import CARRIED_OVER, BucketMemory

logger = logging.getLogger(__name__)
# Of DDP's states; FSDP2's have their own in hooks/fsdp/state.py, local SGD's in hooks/local_sgd/saved.py.
FORMAT = 6  # the default options of compressors belong to it: tests/ddp_core/memory/test_checkpoint.py lists them
FIELDS = ("step", "buckets", "parameters")
RANKS = "ranks"  # the field of the states of all ranks
ADVICE = {
    "gradwire": "load it with the version of gradwire that wrote it",
    "compressor": "attach that compressor, load, then swap() to the new one",
    "world_size": "resume on as many ranks, or give the states of all old ranks: load_state_dict(states, resize=True)",
    "rank": "residuals are a rank's own: save and load one file per rank. If a framework saves on rank 0 alone, save the "
    "result of gather_state_dict() and load it by scatter_state_dict()",
}
LEFT_OUT = "the state of %d parameters that are frozen now is left out: %s; all else is loaded"
CHANGED = "the state was saved with %s, and holds nothing back: training continues with %s"
INCOMPLETE = (
    "a loader such as torch.distributed.checkpoint fills in only entries that exist, or one was dropped: save "
    "the state of each rank as one value, such as the bytes that torch.save makes of it"
)


def header(compressor: Compressor, ranks: Ranks) -> dict[str, Any]:
    """Return what identifies the writer of a state. Saved residuals have all their bits, however many are kept here."""
    return {
        "gradwire": FORMAT,
        "compressor": re.sub(r", residual_bits=\d+", "", fingerprint(compressor)),
        "world_size": ranks.world_size,
        "rank": ranks.rank,
    }


def sealed(
    state: Mapping[str, Any], compressor: Compressor, names: Mapping[Tensor, str], ranks: Ranks, part: str = ""
) -> dict[str, Any]:
    """The state with what tells later whose it is, and whether it is whole and fits.

    `spec`: of the compressor, for messages. `orders`: memory orders of parameters that do not lie row by row. `tensors`: how
    many there are. `part`: of the world, if the ranks are not all of it.
    """
    orders = {name: list(state.get("orders", {}).get(name, axis_order(parameter))) for parameter, name in names.items()}
    unusual = {name: order for name, order in orders.items() if order != sorted(order)}
    held = sum(map(len, state["parameters"].values()))
    told = {"spec": specification(compressor), "orders": unusual, "tensors": held}
    return {**header(compressor, ranks), **state, **told, **({"part": part} if part else {})}


def blank(compressor: Compressor, names: Mapping[Tensor, str], ranks: Ranks) -> Entries:
    """Return zeros for what a step will fill in by parameter, not by bucket, for loaders that fill in what is there."""
    entries: Entries = {}
    if ranks_given(compressor) is not None:  # shares are of buckets
        return entries
    for parameter, name in names.items():
        layout = layout_of({name: parameter}, grad_dtype(parameter).to_real(), parameter.device, ranks)
        fields = states.save(compressor.init(layout)).get(name, {})
        by_bucket = {field for first in fields if first.endswith(FIRST) for field in (first, first.removesuffix(FIRST))}
        if kept := {field: numbers for field, numbers in fields.items() if field not in by_bucket}:
            entries[name] = kept
    return entries


def checked(saved: Any, compressor: Compressor, ranks: Ranks, frozen: Collection[str] = ()) -> dict[str, Any]:
    """The state, its parameters by their plain names; without those that are `frozen` now, of which a warning tells.

    Raises ValueError, saying what differs and what to do, unless this rank and compressor can take it.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"a state is the mapping that state_dict() of a handle returns, got {type(saved).__name__}")
    expected = header(compressor, ranks)
    if missing := [key for key in (*expected, *FIELDS) if key not in saved]:
        raise ValueError(f"this is no result of handle.state_dict(): it lacks {', '.join(missing)}")
    now, then = specification(compressor), saved.get("spec", saved["compressor"])
    alike = {"compressor"} if then == now or holds_nothing(saved) else set()  # options may have come since
    for key, here in expected.items():
        if type(saved[key]) is not type(here) or (saved[key] != here and key not in alike):
            there, here = (then, now) if key == "compressor" else (saved[key], here)
            raise ValueError(f"the state was saved with {key} = {there}, here it is {here}: {ADVICE[key]}")
    if alike and then != now and ranks.rank == 0:
        logger.warning(CHANGED, then, now)
    check_form(saved)
    listed = {name for names in saved["buckets"] for name in names}
    state = {**saved, **renamed(saved, plain_names({*listed, *saved["parameters"]}))}
    state["parameters"] = {
        name: {field: numbers.detach() for field, numbers in fields.items()}
        for name, fields in state["parameters"].items()
    }
    return without(state, frozen, warn=ranks.rank == 0)


def holds_nothing(saved: Mapping[str, Any]) -> bool:
    """Return True if a whole state has no tensor: any compressor can go on from its step, and loses nothing."""
    parameters, count = saved["parameters"], saved.get("tensors")
    return type(count) is int and not count and isinstance(parameters, Mapping) and not any(parameters.values())


def check_part(saved: Mapping[str, Any], part: str) -> None:
    """Raise ValueError where a state is of another part of the world, whose ranks have other parts of parameters."""
    if (there := saved.get("part", "")) != part:
        raise ValueError(
            f"the state is of {there or 'ranks that were the whole world'}, this rank is in {part or 'no part of it'}: load "
            "each rank's own, with as much tensor parallelism as it was saved with"
        )


def of_part(states: Any, part: str) -> Any:
    """Return those of all ranks' states that are of a part of the world; what is no list of states as it is."""
    if not isinstance(states, Sequence) or not all(isinstance(state, Mapping) for state in states):
        return states
    return [state for state in states if state.get("part", "") == part]


def without(state: dict[str, Any], frozen: Collection[str], *, warn: bool) -> dict[str, Any]:
    """Return the state without its parameters that are frozen now. `warn`: have a warning name them."""
    names = {*state["parameters"], *(name for bucket in state["buckets"] for name in bucket)}
    if not (gone := sorted(names & set(frozen))):
        return state
    if warn:
        logger.warning(LEFT_OUT, len(gone), ", ".join(gone))
    if type(state.get("tensors")) is int:
        state["tensors"] -= sum(len(state["parameters"].get(name, ())) for name in gone)
    return {**state, **renamed(state, {name: name for name in names.difference(gone)})}


def check_form(saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless the state has the form of what a handle saves, and is finite."""
    step, buckets, parameters = (saved[key] for key in FIELDS)
    if type(step) is not int or step < 0:
        raise ValueError(f"the step of a state is a number of steps, got {step!r}")
    if not _nested(buckets, list | tuple) or not all(isinstance(name, str) for names in buckets for name in names):
        raise ValueError(f"the buckets of a state are lists of names, got {buckets!r}")
    on_hosts = saved.get("ranks_per_host", 1)
    if type(on_hosts) is not int or on_hosts < 1 or saved.get("world_size", on_hosts) % on_hosts:
        raise ValueError(f"the ranks_per_host of a state divide its ranks, got {on_hosts!r}")
    if len(set(listed := [name for names in buckets for name in names])) < len(listed):
        raise ValueError(f"the buckets of a state have a parameter twice: {buckets!r}")
    if not isinstance(parameters, Mapping) or not _nested(tuple(parameters.values()), Mapping):
        raise ValueError(
            'the parameters of a state are {name: {field: tensor}}, as in handle.state_dict()["parameters"]'
        )
    for name, fields in parameters.items():
        if not isinstance(name, str):
            raise ValueError(f"the parameters of a state go by their names, which are text, got {name!r}")
        for field, numbers in fields.items():
            if wrong := _flaw(field, numbers):
                raise ValueError(f"the saved {field!r} of parameter {name!r} {wrong}: the state cannot be used")


def _whole(saved: Mapping[str, Any]) -> bool:
    """Return True if all tensors are there, as far as the state shows."""
    whole = saved.get("tensors")
    return type(whole) is int and sum(map(len, saved["parameters"].values())) >= whole


def check_whole(saved: Mapping[str, Any]) -> None:
    """Raise ValueError where tensors are no longer there."""
    if "tensors" in saved and not _whole(saved):
        held = sum(map(len, saved["parameters"].values()))
        raise ValueError(f"the state has {held} of its {saved['tensors']} tensors: {INCOMPLETE}")


def _nested(value: Any, kind: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value)


def _flaw(field: Any, numbers: Any) -> str | None:
    """Return what is wrong with a tensor of a state, or None."""
    if not isinstance(numbers, Tensor) or not isinstance(field, str):
        return f"is no tensor but {type(numbers).__name__}"
    if numbers.layout != torch.strided:
        return f"is not strided but {numbers.layout}"
    if numbers.is_meta:
        return "has no numbers: it is on the meta device"
    if field.endswith(FIRST):
        index = numbers.numel() == 1 and numbers.dtype in (torch.int64, torch.int32)
        return None if index else f"is no index but {numbers.dtype} of shape {tuple(numbers.shape)}"
    if not numbers.is_floating_point():
        return f"has no real numbers but {numbers.dtype}"
    return None if bool(numbers.isfinite().all()) else "is not finite everywhere"


def check_parameters(
    saved: Mapping[str, Any], compressor: Compressor, names: Mapping[Tensor, str], ranks: Ranks
) -> None:
    """Raise ValueError, naming the parameter, unless every saved tensor fits a parameter of the model."""
    parameters = {name: parameter for parameter, name in names.items()}
    if unknown := sorted(set(saved["parameters"]) - set(parameters)):
        raise ValueError(f"the state has parameters that the model does not train: {', '.join(unknown)}")
    for name, fields in saved["parameters"].items():
        needed = parameters[name].numel() * (2 if parameters[name].is_complex() else 1)
        shape = tuple(fields[CARRIED_OVER].shape) if CARRIED_OVER in fields else (needed,)
        if shape != (needed,):
            raise ValueError(f"the saved {CARRIED_OVER!r} of parameter {name!r} has shape {shape}, not ({needed},)")
    for layout in layouts(saved, parameters, torch.device("meta"), ranks):
        state = compressor.init(layout)
        for name, needed_fields in states.save(state).items():
            if (fields := saved["parameters"].get(name, {})) or not _whole(saved):  # a swap may have left nothing
                _check_complete(name, needed_fields, fields)
        states.load(state, {name: saved["parameters"].get(name, {}) for name in layout.names})


def aligned(
    saved: Mapping[str, Any], compressor: Compressor, names: Mapping[Tensor, str], ranks: Ranks
) -> dict[str, Any]:
    """Return a saved state as it lies in memory with the model's parameters, whatever format these had when it was saved.

    Raises ValueError for axes that a parameter does not have.
    """
    given = saved.get("orders")
    orders, parameters, entries = {}, dict(saved["parameters"]), given if isinstance(given, Mapping) else {}
    ranks = dataclasses.replace(ranks, per_host=saved.get("ranks_per_host", 1))
    for parameter, name in names.items():
        orders[name] = here = axis_order(parameter)
        there = entries.get(name, sorted(here) if isinstance(given, Mapping) else here)
        if list(there) == here or name not in parameters:
            continue
        if sorted(there) != sorted(here):
            raise ValueError(
                f"the state of parameter {name!r} was saved with its axes in the memory order {list(there)}, here it is "
                f"{here}: load the state with the model that saved it"
            )
        alone = layout_of({name: parameter}, grad_dtype(parameter).to_real(), torch.device("cpu"), ranks)
        move = Move.of(alone.shapes[0], there, here)
        parameters[name] = moved(parameters[name], move, compressor, alone, saved["step"])
    whole = {"tensors": sum(map(len, parameters.values()))} if _whole(saved) else {}
    return {**saved, "parameters": parameters, "orders": orders, **whole}


def layouts(
    saved: Mapping[str, Any], parameters: Mapping[str, Tensor], device: torch.device, ranks: Ranks
) -> Iterator[Layout]:
    """Yield the layouts of a saved state's buckets. Raises ValueError where the model lacks their parameters."""
    ranks = dataclasses.replace(ranks, per_host=saved.get("ranks_per_host", 1))
    for bucket in filter(None, saved["buckets"]):
        if unknown := sorted(set(bucket) - set(parameters)):
            raise ValueError(f"the state has buckets of parameters that the model does not train: {', '.join(unknown)}")
        dtype = grad_dtype(parameters[bucket[0]]).to_real()
        yield layout_of({name: parameters[name] for name in bucket}, dtype, device, ranks)


def _check_complete(name: str, needed: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> None:
    """Raise ValueError if fields of a parameter are missing.

    `carried_over` may stand for any of them: it has what lost its place when buckets changed. The part of a server may lie
    elsewhere.
    """
    needed = {field: each for field, each in needed.items() if f"{field}{FIRST}" not in needed and FIRST not in field}
    starts = {field.partition(PART)[0] for field in fields}
    lacking = [field for field in needed if field.partition(PART)[0] not in starts]
    if lacking and CARRIED_OVER not in fields:
        raise ValueError(f"the state lacks {', '.join(lacking)} of parameter {name!r}: {INCOMPLETE}")


def renamed(saved: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The state with its parameters under other names."""
    state = {
        "step": saved["step"],
        "buckets": [[names[name] for name in bucket if name in names] for bucket in saved["buckets"]],
        "parameters": {names[name]: fields for name, fields in saved["parameters"].items() if name in names},
    }
    if "ranks_per_host" in saved:
        state["ranks_per_host"] = saved["ranks_per_host"]
    if isinstance(saved.get("orders"), Mapping):
        state["orders"] = {names.get(name, name): order for name, order in saved["orders"].items()}
    return state


def all_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One value of the states of all ranks, in rank order, for a framework that saves on rank 0 alone.

    They lie in a tuple, which torch.distributed.checkpoint takes as one value, whatever is inside. Each part of the world
    has a key of its own there.
    """
    return {"gradwire": FORMAT, ", ".join(filter(None, (RANKS, states[0].get("part")))): tuple(states)}


def is_gathered(saved: Any) -> bool:
    """Return True if a state is that of all ranks."""
    return _gathered_key(saved) is not None


def _gathered_key(saved: Any) -> str | None:
    keys = map(str, saved) if isinstance(saved, Mapping) else ()
    return next((key for key in keys if key.partition(", ")[0] == RANKS), None)


def states_of(saved: Any) -> Sequence[Mapping[str, Any]]:
    """The states of all ranks. Raises ValueError for what `all_states` did not make."""
    key = _gathered_key(saved)
    states = None if key is None else saved[key]
    if not isinstance(states, list | tuple) or not states:
        raise ValueError(
            f"the first rank scatters the result of its gather_state_dict(); got {type(saved).__name__}"
            + (f" of {', '.join(map(repr, saved)) or 'nothing'}" if isinstance(saved, Mapping) else "")
        )
    return states


def on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state whose tensors another process can take, which may not see this one's device."""
    parameters = {
        name: {field: numbers.cpu() for field, numbers in fields.items()}
        for name, fields in state["parameters"].items()
    }
    return {**state, "parameters": parameters}


def merged(
    states: Any, compressor: Compressor, names: Mapping[Tensor, str], frozen: Collection[str] = ()
) -> dict[str, Any]:
    """The state from which every rank goes on, whatever their number: it owes the mean of what all ranks held back.

    So the mean over ranks of what is held back, which is what the average lacks, stays what it was; so does that of momenta.
    All else is rank 0's, and alike on all ranks. Raises ValueError unless `states` are those of all ranks after one step,
    each of them once. `frozen`: as for `checked`.
    """
    given = _ordered(states)
    places = [Ranks(len(given), rank) for rank in range(len(given))]
    ordered = [checked(state, compressor, ranks, frozen) for state, ranks in zip(given, places, strict=True)]
    ordered = [aligned(state, compressor, names, ranks) for state, ranks in zip(ordered, places, strict=True)]
    for state, ranks in zip(ordered, places, strict=True):
        check_parameters(state, compressor, names, ranks)
        check_whole(state)
    if len(steps := {state["step"] for state in ordered}) > 1:
        raise ValueError(f"the states were saved after different steps: {sorted(steps)}")
    parameters = {name: parameter for parameter, name in names.items()}
    buckets = [_buckets(each, compressor, parameters, ranks) for each, ranks in zip(ordered, places, strict=True)]
    held = summed(bucket.held_back() for mine in buckets for bucket in mine)
    mean = {name: held[name] / len(ordered) for name in held}
    if (first := dict(ordered[0])).pop("ranks_per_host", 1) > 1:  # all else, momenta too, was of rank 0's share
        return {**first, "parameters": {name: {CARRIED_OVER: numbers} for name, numbers in mean.items()}}
    momenta = _mean_momenta(buckets)  # first: `_owing` empties the buckets of rank 0
    entries = _owing(buckets[0], mean)
    for name, fields in momenta.items():
        entries[name].update(fields)
    return {**first, "parameters": entries}


def _mean_momenta(buckets: Sequence[Sequence[BucketMemory]]) -> Entries:
    """The mean over ranks of what is made of their gradients and is not held back."""
    total: Entries = {}
    for bucket in (bucket for mine in buckets for bucket in mine):
        for name, fields in bucket.leaves.averaged().items():
            total[name] = summed([total.get(name, {}), fields])
    return {name: {field: sums[field] / len(buckets) for field in sums} for name, sums in total.items()}


def _ordered(states: Any) -> list[Mapping[str, Any]]:
    """The states by rank."""
    if not isinstance(states, Sequence) or not all(isinstance(state, Mapping) for state in states):
        raise ValueError(f"resize=True takes a list of the states of all ranks, got {type(states).__name__}")
    ranks = [(state.get("rank"), state.get("world_size")) for state in states]
    expected = [(rank, len(states)) for rank in range(len(states))]
    if not states or len(ranks) != len(set(map(str, ranks))) or any(each not in expected for each in ranks):
        raise ValueError(f"resize=True takes the states of all ranks, each of them once; got (rank, of) {ranks}")
    return sorted(states, key=lambda state: int(state["rank"]))


def _buckets(
    state: Mapping[str, Any], compressor: Compressor, parameters: Mapping[str, Tensor], ranks: Ranks
) -> list[BucketMemory]:
    """The memory of one rank: its buckets, and one for each parameter that was in none."""
    listed = {name for names in state["buckets"] for name in names}
    alone = [[name] for name in state["parameters"] if name not in listed]
    found = layouts({**state, "buckets": [*state["buckets"], *alone]}, parameters, torch.device("cpu"), ranks)
    buckets = [BucketMemory(compressor, layout, state["step"]) for layout in found]
    for bucket in buckets:
        bucket.load({name: state["parameters"][name] for name in bucket.layout.names if name in state["parameters"]})
    return buckets


def _owing(buckets: Sequence[BucketMemory], held: Mapping[str, Tensor]) -> Entries:
    """Return the memory of one rank, which holds back nothing but what it is given."""
    entries: Entries = {}
    for bucket in buckets:
        bucket.rescale(0.0)
        entries.update(bucket.save())
    for name, numbers in held.items():
        entries.setdefault(name, {})[CARRIED_OVER] = numbers
    return entries
