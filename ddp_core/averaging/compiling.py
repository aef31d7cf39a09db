"""Kernels are compiled where a bucket is met, not inside a collective that other ranks wait for."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from itertools import product

import torch

from ...compress import Compressor, Layout, specification
from ...compress.simulate import rehearse, variants
from ...kernels import all_finite

MOST_ROWS = 1024
LARGE = 1 << 20  # elements
logger = logging.getLogger(__name__)
_compiled: set[tuple[str, torch.device, torch.dtype, bool]] = set()


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
