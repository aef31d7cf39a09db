"""Kernels are compiled where a bucket is met, not inside a collective that other ranks wait for."""

from __future__ import annotations

import logging
import time

import torch

from ...compress import Compressor, Layout, specification
from ...compress.simulate import boundaries, rehearse
from ...kernels import all_finite

logger = logging.getLogger(__name__)
_compiled: set[tuple[str, torch.device, torch.dtype]] = set()


def compile_kernels(compressor: Compressor, layout: Layout) -> None:
    """Run every stage of a compressor once on zeros, on the current stream: what its kernels need is compiled then.

    Once in a process for each device and dtype, and on CUDA only: elsewhere nothing is compiled. Takes, while it runs, the
    memory of the bucket and of its state.
    """
    key = (specification(compressor), layout.device, layout.dtype)
    if layout.device.type != "cuda" or key in _compiled:
        return
    _compiled.add(key)
    logger.info(
        "compiling the kernels of %s for %s on %s, where they are not cached", key[0], layout.dtype, layout.device
    )
    began = time.perf_counter()
    for step in boundaries(compressor):
        rehearse(compressor, layout, step)
    all_finite(torch.zeros(1, dtype=layout.dtype, device=layout.device))
    logger.info("the kernels of %s are there after %.1f s", key[0], time.perf_counter() - began)
