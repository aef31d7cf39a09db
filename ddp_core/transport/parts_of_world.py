"""The parts of the world whose ranks average among themselves alone, as with tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


def part_of_world(ranks: Sequence[int], world: int) -> str:
    """Return which part of a world of so many ranks these are; "" if they are all of it.

    Parts are alike: each has the ranks of the first one, moved up. They are counted by their first ranks, so that a part
    keeps its number when others join it. Where they are not alike, its first rank is its number.

    >>> [part_of_world(ranks, 4) for ranks in ([0, 1, 2, 3], [1, 3], [2, 3], [0, 3])]
    ['', 'part 1 of 2', 'part 1 of 2', 'part from rank 0']
    """
    first, covered = min(ranks), list[int]()
    firsts = []
    for rank in range(world):
        if rank not in covered:
            firsts.append(rank)
            covered += [rank + each - first for each in ranks]
    if sorted(covered) != list(range(world)) or first not in firsts:
        return f"part from rank {first}"
    return f"part {firsts.index(first)} of {len(firsts)}" if len(firsts) > 1 else ""


def part_of(group: dist.ProcessGroup) -> str:
    """Return which part of the world the ranks of a group are: see `part_of_world`."""
    return part_of_world(dist.get_process_group_ranks(group), dist.get_world_size())
