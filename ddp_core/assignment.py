"""Which parameters share a bucket (Li et al. 2020, section 3.2.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

MEBIBYTE = 1024 * 1024
DEFAULT_CAP_MB = 25.0
DEFAULT_FIRST_CAP = MEBIBYTE  # bytes; as torch's default: the first bucket leaves early


def caps_in_bytes(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None = None) -> list[int]:
    """The cap of each bucket in the order sent; the last one holds for all that follow.

    None is torch's default: 1 MiB, then 25 MiB. An explicit size holds for the first bucket too.

    >>> caps_in_bytes(None), caps_in_bytes(10), caps_in_bytes(None, [1, 4])
    ([1048576, 26214400], [10485760], [1048576, 4194304])
    """
    if bucket_cap_mb is not None and bucket_cap_mb_list is not None:
        raise ValueError("bucket_cap_mb and bucket_cap_mb_list exclude each other: one size, or one a bucket")
    sizes = bucket_cap_mb_list if bucket_cap_mb_list is not None else [bucket_cap_mb]
    if bucket_cap_mb is None and bucket_cap_mb_list is None:
        return [DEFAULT_FIRST_CAP, int(DEFAULT_CAP_MB * MEBIBYTE)]
    if not sizes or any(size is None or not size > 0 for size in sizes):
        raise ValueError(f"the size of a bucket is a number of MiB above 0, got {list(sizes)}")
    return [int(size * MEBIBYTE) for size in sizes if size is not None]


def assigned(parameters: Sequence[Tensor], caps: Sequence[int], alone: Sequence[bool]) -> list[list[int]]:
    """The indices of each bucket's members, buckets in the order in which their last member comes.

    Members share dtype and device; a bucket closes with the member that fills it. Those marked `alone` (sparse gradients)
    have a bucket each.
    """
    buckets: list[list[int]] = []
    filling: dict[object, list[int]] = {}
    room: dict[object, float] = {}
    limits: dict[object, Iterator[int]] = {}
    for index, parameter in enumerate(parameters):
        if alone[index]:
            buckets.append([index])
            continue
        key = (parameter.dtype, parameter.device)
        if key not in filling:
            filling[key] = []
            room[key] = next(limits.setdefault(key, iter(caps)), caps[-1])
        filling[key].append(index)
        room[key] -= parameter.nbytes
        if room[key] <= 0:
            buckets.append(filling.pop(key))
    return sorted([*buckets, *filling.values()], key=lambda members: members[-1])
