"""A sharded model's saved state: its checks before it is loaded, and residuals as another number of ranks has them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...compress import Compressor, Ranks
from ...compress.shards.layout import ShardLayout
from ...compress.shards.reduction import ShardSum
from ...compress.state.tree import Entries
from ...ddp_core.memory.bucket_memory import CARRIED_OVER
from ...ddp_core.memory.checkpoint import ADVICE, CHANGED, LEFT_OUT, check_form, check_whole, holds_nothing
from ...ddp_core.memory.checkpoint import merged as merged_replicas

logger = logging.getLogger(__name__)
FORMAT = 6  # of FSDP2's states; see ddp_core/memory/checkpoint.py for DDP's, hooks/local_sgd/saved.py for local SGD's
FIELDS = ("gradwire", "reduce", "step", "parameters", "weights")
HELD = {"residual"}  # the fields of a parameter, as `ShardState` names them


def key_of(rank: int, ranks: int, part: str) -> str:
    """Return the key of a rank's state, which no other rank of the world has.

    >>> key_of(0, 2, ""), key_of(0, 2, "part 1 of 2")
    ('rank 0 of 2', 'rank 0 of 2, part 1 of 2')
    """
    return ", ".join(filter(None, (f"rank {rank} of {ranks}", part)))


def own(saved: Any, key: str) -> Mapping[str, Any]:
    """This rank's part of a state dict, under its key. Raises ValueError where it is another rank's."""
    if not isinstance(saved, Mapping) or not saved:
        raise ValueError(f"a state is the mapping that state_dict() of a handle returns, got {type(saved).__name__}")
    if key not in saved:
        raise ValueError(
            f"the state is of {', '.join(map(str, saved))}, this is {key}: load each rank's own, or on another number of "
            "ranks those of all: load_state_dict(states, resize=True)"
        )
    inside: Mapping[str, Any] = saved[key]
    return inside


def checked(
    state: Mapping[str, Any], reduction: ShardSum, names: set[str], frozen: Collection[str] = (), *, warn: bool = False
) -> Mapping[str, Any]:
    """The state, if it is one of this model and of gradients that travel so; without parameters that are `frozen` now.

    `names`: of the parameters that train. Without error feedback a state has some of them for a step after a swap, which
    brings out what was held back before. `warn`: have warnings name those that are frozen, and another
    `reduce`. Raises ValueError.
    """
    missing = [key for key in FIELDS if not isinstance(state, Mapping) or key not in state]
    if missing:
        raise ValueError(f"this is no state of a gradwire handle of FSDP: it lacks {', '.join(missing)}")
    before = None
    if state["reduce"] != str(reduction) and not reduction.feedback and holds_nothing(state):
        before, state = state["reduce"], {**state, "reduce": str(reduction)}
    for key, here, advice in (
        ("gradwire", FORMAT, ADVICE["gradwire"]),
        ("reduce", str(reduction), "attach as it was when the state was saved, load, then swap()"),
    ):
        if state[key] != here:
            raise ValueError(f"the state was saved with {key} = {state[key]}, here it is {here}: {advice}")
    if before is not None and warn:
        logger.warning(CHANGED, before, reduction)
    check_entries(state)
    saved = {name for name, fields in state["parameters"].items() if fields}
    if gone := sorted(saved.intersection(frozen)):
        saved = saved.difference(gone)
        if warn:
            logger.warning(LEFT_OUT, len(gone), ", ".join(gone))
    if differing := sorted(saved ^ names if reduction.feedback else saved - names):
        raise ValueError(
            f"the state and the model do not have the same parameters; only one of them has {', '.join(differing[:3])}"
        )
    check_whole(state)
    detached = {name: {field: each.detach() for field, each in state["parameters"][name].items()} for name in saved}
    return {**state, "parameters": detached}


def check_entries(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless a state has what a handle saves of each parameter, and nothing else."""
    check_form({"buckets": (), **state})
    for name, fields in state["parameters"].items():
        if fields and set(fields) != HELD:
            raise ValueError(
                f"parameter {name!r} of the state has the fields {', '.join(sorted(fields))}, and {', '.join(HELD)} is "
                "expected: load the result of a handle's state_dict() unchanged"
            )


def among_replicas(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a state that the handle of the replicas takes. Raises ValueError where there is none."""
    if "replicas" not in state:
        raise ValueError(
            "the state was saved without compression among replicas: attach as it was, load, then attach anew"
        )
    inside: Mapping[str, Any] = state["replicas"]
    return inside


def merged(states: Any, part: str) -> dict[str, Any]:
    """The state from which every rank goes on, whatever their number: the mean of what all ranks held back.

    So the mean over ranks of what is held back, which is what the mean gradient lacks, stays what it was. "replicas" has the
    states of the replicas' handles, by rank, where all were saved. `part`: of the world, whose states alone are used.
    Raises ValueError unless `states` are those of all ranks after one step, each of them once.
    """
    if not isinstance(states, Sequence) or not all(isinstance(state, Mapping) for state in states):
        raise ValueError(f"resize=True takes a list of the states of all ranks, got {type(states).__name__}")
    given = {str(key): inside for state in states for key, inside in state.items()}
    mine = [key for state in states for key in map(str, state) if key.partition(", ")[2] == part]
    expected = [key_of(rank, len(mine), part) for rank in range(len(mine))]
    if not mine or set(mine) != set(expected):
        whose = f"all ranks of {part}" if part else "all ranks"
        raise ValueError(f"resize=True takes the states of {whose}, each of them once; got {', '.join(given)}")
    parts = [given[key] for key in expected]
    for key in ("reduce", "step"):
        if len(values := {part[key] for part in parts}) > 1:
            raise ValueError(f"the states differ in their {key}: {values}")
    for each in parts:
        check_entries(each)
    replicas = {"replicas": [part["replicas"] for part in parts]} if all("replicas" in part for part in parts) else {}
    return {**parts[0], "parameters": {name: _mean(parts, name) for name in parts[0]["parameters"]}, **replicas}


def _mean(parts: Sequence[Mapping[str, Any]], name: str) -> dict[str, Tensor]:
    fields = parts[0]["parameters"][name]
    return {field: sum(part["parameters"][name][field] for part in parts) / len(parts) for field in fields}


def owed_by_replicas(
    states: Sequence[Mapping[str, Any]],
    layouts: Sequence[ShardLayout],
    compressor: Compressor,
    frozen: Collection[str] = (),
) -> dict[str, Any]:
    """The state from which replicas go on: they owe this rank's shards of the mean of what all replicas held back.

    `states`: of the replicas' handle on every rank of a mesh (replicas, shards), by rank. `layouts`: of the modules, here.
    `frozen`: parameters that are left out.
    All else that was remembered (momenta, factors) was of other shards, and begins anew. Raises ValueError where the states
    are not of this model or compressor.
    """
    replicas = states[0].get("world_size") if isinstance(states[0], Mapping) else None
    if not isinstance(replicas, int) or not 0 < replicas <= len(states):
        raise ValueError(f"the states of replicas say that there were {replicas!r} of them, on {len(states)} ranks")
    shards = len(states) // replicas
    before = [replace(layout, whole=replace(layout.whole, ranks=Ranks(shards))) for layout in layouts]
    names = {
        torch.empty(shape, dtype=layout.whole.dtype, device="meta"): name
        for layout in before
        for name, shape in zip(layout.whole.names, layout.shapes, strict=True)
    }
    means = [merged_replicas(states[shard::shards], compressor, names, frozen) for shard in range(shards)]
    held = [mean["parameters"] for mean in means]
    owed = [_cut_anew(held, old, new) for old, new in zip(before, layouts, strict=True)]
    return {**means[0], "parameters": {name: fields for each in owed for name, fields in each.items()}}


def _cut_anew(held: Sequence[Entries], old: ShardLayout, new: ShardLayout) -> Entries:
    """This rank's shards of what is owed to a module's parameters, given those of each shard there was."""
    before, now = (torch.zeros(layout.numel, dtype=layout.whole.dtype) for layout in (old, new))
    carried = [name for name in old.whole.names if CARRIED_OVER in held[0].get(name, {})]
    parts = dict(old.parts(before))
    for name in carried:
        parts[name].copy_(torch.stack([entries[name][CARRIED_OVER] for entries in held]).view_as(parts[name]))
    for name, whole in old.joined(before).items():
        new.cut(name, whole, now)
    parts = dict(new.parts(now))
    return {name: {CARRIED_OVER: parts[name][new.whole.ranks.rank].flatten()} for name in carried}
