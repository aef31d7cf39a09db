"""What was held back among replicas, of a training that goes on with another number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...compress import Compressor
from ...compress.shards.layout import ShardLayout
from ...compress.state.tree import Entries
from ...ddp_core.memory.bucket_memory import CARRIED_OVER
from ...ddp_core.memory.resize import merged


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
    before = [replace(layout, whole=replace(layout.whole, world_size=shards, rank=0)) for layout in layouts]
    names = {
        torch.empty(shape, dtype=layout.whole.dtype, device="meta"): name
        for layout in before
        for name, shape in zip(layout.whole.names, layout.shapes, strict=True)
    }
    means = [merged(states[shard::shards], compressor, names, frozen) for shard in range(shards)]
    held = [mean["parameters"] for mean in means]
    owed = [_cut_anew(held, old, new) for old, new in zip(before, layouts, strict=True)]
    return {**means[0], "parameters": {name: fields for each in owed for name, fields in each.items()}}


def _cut_anew(held: Sequence[Entries], old: ShardLayout, new: ShardLayout) -> Entries:
    """This rank's shards of what is owed to a module's parameters, given those of each shard there was."""
    before, now = (torch.zeros(layout.numel, dtype=layout.whole.dtype) for layout in (old, new))
    owing = [name for name in old.whole.names if CARRIED_OVER in held[0].get(name, {})]
    parts = dict(old.parts(before))
    for name in owing:
        parts[name].copy_(torch.stack([entries[name][CARRIED_OVER] for entries in held]).view_as(parts[name]))
    for name, whole in old.joined(before).items():
        new.cut(name, whole, now)
    parts = dict(new.parts(now))
    return {name: {CARRIED_OVER: parts[name][new.whole.rank].flatten()} for name in owing}
