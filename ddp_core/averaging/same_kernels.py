"""The kernels of all ranks: the same backend for each operation, compiled before a collective waits for them.

Backends round differently, and models would drift apart.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from ...compress import Compressor, Layout, specification
from ...compress.protocol.compressor import traits_of
from ...compress.simulate import rehearse, variants
from ...kernels import all_finite, operations
from ...kernels.argument_checks import FLOATS
from ...kernels.dispatch import REFERENCE, agree_on, requested_by
from ..transport.protocol import Transport
from ..transport.rank_messages import exchange

logger = logging.getLogger(__name__)
MOST_ROWS = 1024
LARGE = 1 << 20  # elements
MULTIPLIES = "low_rank_finish"  # of what every rank computes by itself: the one with sums of products
_compiled: set[tuple[str, torch.device, torch.dtype, bool]] = set()


def agree_on_kernels(
    names: Collection[str],
    transport: Transport,
    device: torch.device,
    *,
    varies_with_threads: bool = False,
) -> bool:
    """Have all ranks run these operations on the best backend that all of them have. A collective call.

    A backend that a rank requested is the only one that it has. `varies_with_threads`: see the function of that name. Return
    True if ranks may round differently all the same: see `follow_kernels`. Raises ValueError where ranks requested different
    backends.
    """
    if transport.ranks.world_size == 1:
        return False
    offer = kernel_offer(names, device, varies_with_threads=varies_with_threads)
    told = exchange(json.dumps(offer), transport, what="their kernel backends")
    return follow_kernels([json.loads(text) for text in told], transport.ranks.rank, device)


def varies_with_threads(compressor: Compressor, names: Collection[str], dtypes: Collection[torch.dtype]) -> bool:
    """Return True if a rank's threads change what a compressor computes by these operations, of numbers of these dtypes."""
    by_torch = MULTIPLIES in names and not set(FLOATS).issuperset(dtypes)  # no backend knows others
    return traits_of(compressor).varies_with_threads or by_torch


def kernel_offer(names: Collection[str], device: torch.device, *, varies_with_threads: bool = False) -> dict[str, Any]:
    """Return the backends that may run these operations here, and all else that `follow_kernels` compares."""
    table = operations()
    offers = {name: table[name].offers(device.type) for name in sorted(names)}
    threads = {"threads": str(torch.get_num_threads()), "vectors": torch.backends.cpu.get_cpu_capability()}
    varies = device.type == "cpu" and varies_with_threads
    return {
        "offers": offers, "by": requested_by(), "versions": _versions(device), "threads": threads, "varies": varies
    }  # fmt: skip


def follow_kernels(ranks: Sequence[Mapping[str, Any]], rank: int, device: torch.device) -> bool:
    """Run operations on the best backend that all ranks offer; `ranks`: their offers, of the same operations.

    Return True if versions or GPUs differ between ranks, or threads and vector instructions where torch multiplies matrices
    on CPUs, whose sums depend on them. The first rank warns of it.
    """
    offers = ranks[rank]["offers"]
    common = {name: _common(name, ranks) for name in offers}
    by_torch = device.type == "cpu" and common.get(MULTIPLIES) == REFERENCE
    threads = any(each["varies"] for each in ranks) or by_torch
    differing = _differing([each["versions"] | (each["threads"] if threads else {}) for each in ranks])
    if differing and rank == 0:
        warnings.warn(
            f"the ranks may round differently, and their models drift apart ({differing}): install the same versions on all "
            "ranks, on GPUs of one compute capability, or on CPUs of one kind with the same OMP_NUM_THREADS",
            stacklevel=2,
        )
    lowered = {name: backend for name, backend in common.items() if backend != offers[name][0]}
    agree_on(device.type, lowered)
    for backend in sorted({*lowered.values()}):
        names = [name for name in lowered if lowered[name] == backend]
        lacking = [rank for rank, each in enumerate(ranks) if any(each["offers"][n][0] == backend for n in names)]
        which = ", ".join(names)
        logger.warning("%s runs on the kernel backend %s, since ranks %s have no better one", which, backend, lacking)
    return bool(differing)


def _common(name: str, ranks: Sequence[Mapping[str, Any]]) -> str:
    """The backend of an operation that all ranks have, the preferred one of those that have the fewest."""
    offers = [each["offers"][name] for each in ranks]
    shared = [backend for backend in min(offers, key=len) if all(backend in each for each in offers)]
    if shared:
        return str(shared[0])
    has = (
        f"rank {rank} has {' or '.join(each['offers'][name])}" + (f" (by {each['by']})" if each["by"] else "")
        for rank, each in enumerate(ranks)
    )
    raise ValueError(
        f"the ranks were set up differently: no kernel backend for {name} is on all ranks: {', '.join(has)}; request the "
        "same one on all ranks by GRADWIRE_KERNELS or use_backend, or none"
    )


def _versions(device: torch.device) -> dict[str, str]:
    """Return the versions of all else that decides how numbers are rounded."""
    found = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        try:
            found["triton"] = importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            found["triton"] = "none"
    return found


def _differing(ranks: Sequence[Mapping[str, str]]) -> str:
    """Return which ranks have which versions, of all that is not the same on all ranks."""
    told = list[str]()
    for what in ranks[0]:
        having: dict[str, list[int]] = {}
        for rank, each in enumerate(ranks):
            having.setdefault(each[what], []).append(rank)
        if len(having) > 1:
            told.append(f"{what}: " + ", ".join(f"{value} on ranks {found}" for value, found in having.items()))
    return "; ".join(told)


def compile_kernels(compressor: Compressor, layout: Layout) -> None:
    """Run every stage of a compressor once on zeros, on the current stream: its kernels are compiled then.

    Once in a process for each device and dtype, and on CUDA only: elsewhere nothing is compiled.
    """
    matrices = any(len(shape) > 1 for shape in layout.shapes)
    key = (specification(compressor), layout.device, layout.dtype, matrices)
    if layout.device.type != "cuda" or key in _compiled:
        return
    logger.info(
        "compiling the kernels of %s for %s on %s, where they are not cached", key[0], layout.dtype, layout.device
    )
    began = time.perf_counter()
    with torch.autocast("cuda", enabled=False):  # as programs run
        for (first, method), sized in product(variants(compressor), _sizes(layout)):
            for step in (first, first + 1):  # a method may alternate
                rehearse(compressor, sized, step, method)
        all_finite(torch.zeros(1, dtype=layout.dtype, device=layout.device))
    _compiled.add(key)
    logger.info("the kernels of %s are there after %.1f s", key[0], time.perf_counter() - began)


def _sizes(layout: Layout) -> Iterator[Layout]:
    """The bucket, but with few rows of large parameters, which would take memory; and as a larger one where it is small.

    Large ones may have kernels of their own, and the first bucket is often small.
    """
    few = _with_rows(layout, lambda rows: min(rows, MOST_ROWS))
    yield few
    if 0 < few.numel < LARGE:
        yield _with_rows(few, lambda rows: -(-LARGE // few.numel) * rows)


def _with_rows(layout: Layout, rows_of: Callable[[int], int]) -> Layout:
    shapes = tuple((rows_of(shape[0]), *shape[1:]) if shape else shape for shape in layout.shapes)
    return dataclasses.replace(layout, shapes=shapes)
