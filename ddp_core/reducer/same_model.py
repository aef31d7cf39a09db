"""The same model on all ranks: a check before training, and copies of parameters and buffers of one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...compress import Spec, compressor, specification
from ...compress.builder.build import fingerprint
from ..transport.protocol import Transport
from ..transport.rank_messages import broadcast, exchange, largest
from ..transport.same_setup import alike, compared, told
from .unused_parameters import Rules


def described(parameters: Mapping[str, Tensor], spec: Spec, rules: Rules) -> list[str]:
    """Return what ranks must agree on, a line each: the compressor and other arguments, then the parameters."""
    built = compressor(spec)
    of_compressor = alike(fingerprint(built), f"the compressor {specification(built)}")
    return [of_compressor, *rules.shared(), *described_parameters(parameters)]


def described_parameters(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return what ranks must agree on of parameters, a line each."""
    return [
        f"parameter {name} with shape {tuple(p.shape)}, strides {p.stride()}, {p.dtype} on {p.device.type}, "
        f"requires_grad={p.requires_grad}"
        for name, p in parameters.items()
    ]


def verify(lines: Sequence[str], transport: Transport) -> None:
    """Raise RuntimeError on every rank, naming the first difference and the ranks, unless all have the same lines."""
    digest = hashlib.sha256("\n".join(map(compared, lines)).encode()).hexdigest()
    digests = exchange(digest, transport, what="the models that they train")
    differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not differing:
        return
    texts = exchange("\n".join(lines), transport, what="the models that they train")
    mine, other = texts[0].split("\n"), texts[differing[0]].split("\n")
    here, there = next(
        (told(*pair) for pair in zip(mine, other, strict=False) if len(set(map(compared, pair))) > 1),
        tuple(f"{sum(line.startswith('parameter ') for line in lines)} parameters" for lines in (mine, other)),
    )
    raise RuntimeError(
        f"DDP expects same model across all ranks, but rank 0 has {here}, while rank {differing[0]} has {there}"
        + (f"; in all, ranks {differing} differ from rank 0" if len(differing) > 1 else "")
    )


def copy_from(source: int, tensors: Sequence[Tensor], transport: Transport) -> None:
    """Overwrite tensors by those of rank `source` of the group; graphs that saved them stay valid."""
    changed = tuple(tensor.detach() for tensor in tensors if tensor.numel())
    if changed:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(changed):
            broadcast(changed, source, transport, what="their parameters and buffers")


def agreed_rank(candidate: bool, transport: Transport) -> int:
    """The highest rank that is a candidate. Blocks."""
    rank = largest(transport.ranks.rank if candidate else -1, transport)
    if rank < 0:
        raise RuntimeError("no rank has the current model: all have run out of inputs at once")
    return rank
