"""A word to ranks that share a host and send between hosts what a sum inside each host would spare."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ...compress import AllToAll, Compressor, Layout, specification
from ...compress.composed.hierarchical import Hierarchical
from ...compress.simulate import STEADY, dry_run, requests_of
from ...compress.state.shares import ranks_given


def without_levels(compressor: Compressor, layout: Layout, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what `hosts+` would save where each rank of a host sends to all ranks elsewhere; None where it saves nothing.

    The launcher says how many ranks share a host. What counts are the bytes that leave a host for a first bucket.
    """
    world, per_host = layout.ranks.world_size, int(environment.get("LOCAL_WORLD_SIZE", 1))
    if (
        ranks_given(compressor) is not None
        or not 1 < per_host < world
        or world % per_host
        or dist.get_world_size() > world
    ):
        return None
    meta = dataclasses.replace(layout, device=torch.device("meta"))
    requests = list(requests_of(compressor, meta, STEADY))
    if not any(isinstance(request, AllToAll) for request in requests):
        return None
    of_ranks = dry_run(compressor, layout).sent_bytes * per_host * (world - per_host) / (world - 1)
    of_hosts = dry_run(Hierarchical(compressor, per_host), layout).sent_bytes * per_host
    name = specification(compressor)
    return (
        f"each of the {per_host} ranks of a host sends gradients to all ranks of other hosts: hosts+{name} adds them up "
        f"inside a host first, and sends {of_ranks / of_hosts:.1f}x fewer bytes to other hosts"
    )
