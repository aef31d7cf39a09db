"""The memory and the traffic of optimizers, for `gradwire plan`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ..compress import AllGather, AllReduce
from ..compress.protocol.requests import Request
from .workloads.muon import Muon
from .workloads.optimizers import BLOCKS, OptimizerName

ITERATIONS = 5  # of Newton and Schulz in a step of torch's Muon, which computes in bfloat16
MOMENTS = {"adamw": 2, "sgd": 1, "muon": 1}  # tensors of a matrix's size that an optimizer keeps


def stand_in(name: OptimizerName) -> list[Optimizer]:
    """Return optimizers of one matrix and one vector, from which compressors get their options."""
    matrix, vector = (nn.Parameter(torch.empty(shape, device="meta")) for shape in ((2, 2), (2,)))
    if name == "muon":
        return [Muon([matrix], lr=0.1), AdamW([vector])]
    return [AdamW([matrix]) if name == "adamw" else SGD([matrix], lr=0.1, momentum=0.9)]


def matrices_of_blocks(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the parameters of a transformer that Muon takes."""
    return [
        each
        for name, each in parameters.items()
        if each.dim() == 2 and (BLOCKS in name or name.partition(".")[0].isdigit())
    ]


def optimizer_elements(parameters: Mapping[str, Tensor], name: OptimizerName) -> int:
    """Return the numbers that an optimizer keeps for a model; beside Muon, AdamW has the other parameters."""
    elements = sum(each.numel() for each in parameters.values())
    of_muon = sum(each.numel() for each in matrices_of_blocks(parameters)) if name == "muon" else 0
    return MOMENTS[name] * of_muon + MOMENTS["adamw" if name == "muon" else name] * (elements - of_muon)


def muon_requests(matrices: Iterable[Tensor], world_size: int) -> Iterator[Request]:
    """Yield what a step of torch's Muon sends for matrices that are sharded by rows, as torch 2.15 does.

    A matrix X with more rows than columns is transposed, so ranks hold columns of it. Each has a part of the sum X Xᵀ, which
    is all-reduced where it is read and where it is added. Of any other matrix X, X Xᵀ and once more X are gathered.
    """
    for matrix in matrices:
        short, long = sorted(matrix.shape)
        gram = torch.empty((short, short), dtype=torch.bfloat16, device="meta")
        shard, own = (
            torch.empty(math.ceil(elements / world_size), dtype=torch.bfloat16, device="meta")
            for elements in (short * long, gram.numel())
        )
        tall = matrix.shape[0] > matrix.shape[1]
        for _ in range(ITERATIONS):
            yield from (AllReduce(gram), AllReduce(gram)) if tall else map(AllGather, (shard, own, shard))
