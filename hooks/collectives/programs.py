"""Collectives of a training loop as programs: sums by a codec, without memory between calls, and gathers in 16 bits.

All ranks end with the same bits: of a sum they decode the same payloads, and a rank that gathers keeps its own part rounded
too. Nothing is written to a tensor that the loop only gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...compress import Codec, Layout, Ranks, TwoShot
from ...compress.algorithms.adapters import TwoShotState
from ...compress.protocol.requests import Program, all_gather
from ...compress.shards.layout import ShardLayout
from ...compress.shards.reduction import ShardState, ShardSum

SHAPES = 256  # whose cuts are kept, of what a loop sends again and again


@lru_cache(SHAPES)
def _whole(codec: Any, ranks: Ranks, numel: int, dtype: torch.dtype, device: torch.device) -> TwoShotState:
    return averaging(codec).init(Layout(("",), ((numel,),), dtype, device, ranks))


@lru_cache(SHAPES)
def _sharded(codec: Any, ranks: Ranks, numel: int, dtype: torch.dtype, device: torch.device) -> ShardState:
    return ShardSum(codec).init(ShardLayout(Layout(("",), ((numel,),), dtype, device, ranks), (0,)))


def averaging(codec: Codec) -> TwoShot:
    """Return the compressor that averages by a codec and remembers nothing."""
    return TwoShot(codec, error_feedback=False)


def all_reduced(
    tensor: Tensor, codec: Any, ranks: Ranks, factor: Tensor | float | None, times: float
) -> Program[Tensor]:
    """`times` the mean over ranks of `factor` times a tensor, in its place."""
    _keep(tensor)
    flat = _plain(tensor)
    if factor is not None:
        flat.mul_(factor)
    state = _whole(codec, ranks, flat.numel(), flat.dtype, flat.device)
    average = yield from averaging(codec).reduce(flat, state)
    if times != 1.0:
        average.mul_(times)
    _write(average, tensor)
    return tensor


def reduce_scattered(
    rows: Sequence[Tensor], output: Tensor, codec: Any, ranks: Ranks, factor: Tensor | float | None, times: float
) -> Program[Tensor]:
    """`times` the mean over ranks of `factor` times this rank's row, in `output`. `rows`: one tensor, or one a rank."""
    _keep(*rows, output)
    flat = torch.cat([_plain(row) for row in rows])  # a copy: encoding may overwrite it
    if factor is not None:
        flat.mul_(factor)
    state = _sharded(codec, ranks, flat.numel(), flat.dtype, flat.device)
    mean = torch.empty(output.numel(), dtype=output.dtype, device=output.device)
    yield from ShardSum(codec).reduce(flat, state, mean, times)
    _write(mean, output)
    return output


def gathered(block: Tensor, outputs: Sequence[Tensor], dtype: torch.dtype) -> Program[Tensor]:
    """All ranks' blocks, rounded to `dtype`, in `outputs`: one tensor, or one a rank."""
    _keep(block, *outputs)
    payload = _plain(block).to(dtype).view(torch.uint8)
    rows = (yield from all_gather(payload)).view(dtype).view(len(outputs), -1)
    for row, output in zip(rows, outputs, strict=True):
        _write(row, output)
    return block


def _keep(*tensors: Tensor) -> None:
    """Have the memory of tensors on a GPU not be reused before the current stream is done with it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers, flat; in their place unless they lie apart, or belong to an inference mode.

    As torch's collectives, it changes numbers that autograd has saved without a word: nothing is counted.
    """
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device).copy_(tensor.reshape(-1))
    return tensor.data.contiguous().view(-1)


def _write(flat: Tensor, tensor: Tensor) -> None:
    """Copy flat numbers to a tensor, unless they are its own."""
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        with torch.inference_mode():
            tensor.data.copy_(flat.view(tensor.shape))
