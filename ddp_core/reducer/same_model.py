"""A check before training starts that all ranks train the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from ...compress import Spec, compressor, specification
from ..transport.collectives import exchange
from ..transport.protocol import Transport


def described(parameters: Mapping[str, Tensor], spec: Spec) -> list[str]:
    """Return what ranks must agree on, a line each: the compressor, then the parameters."""
    lines = [
        f"parameter {name} with shape {tuple(p.shape)}, strides {p.stride()}, {p.dtype} on {p.device.type}, "
        f"requires_grad={p.requires_grad}"
        for name, p in parameters.items()
    ]
    return [f"the compressor {specification(compressor(spec))}", *lines]


def verify(lines: Sequence[str], transport: Transport) -> None:
    """Raise RuntimeError on every rank, naming the first difference and the ranks, unless all have the same lines."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = exchange(digest, transport, what="the models that they train")
    differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not differing:
        return
    texts = exchange("\n".join(lines), transport, what="the models that they train")
    mine, other = texts[0].split("\n"), texts[differing[0]].split("\n")
    here, there = next(
        (pair for pair in zip(mine, other, strict=False) if pair[0] != pair[1]),
        (f"{len(mine) - 1} parameters", f"{len(other) - 1} parameters"),
    )
    raise RuntimeError(
        f"DDP expects same model across all ranks, but rank 0 has {here}, while rank {differing[0]} has {there}"
        + (f"; in all, ranks {differing} differ from rank 0" if len(differing) > 1 else "")
    )
