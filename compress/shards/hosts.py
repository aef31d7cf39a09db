"""Two levels of communication among shards: ranks of a host first, or last, and then those of one place on all hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..algorithms.cuts import Cut, cut_shards
from ..algorithms.payload import ALIGNMENT
from ..builder.build import Spec, compressor, parsed, specification
from ..composed.hierarchical import Hierarchical
from ..protocol.compressor import Codec, own_traits
from ..protocol.layout import working_dtype
from ..protocol.requests import AllGather, AllToAll, Program
from .codec import codec_of, needed
from .layout import ShardLayout


def split_hosts(spec: Spec) -> tuple[Hierarchical | None, Spec]:
    """Return the two levels that a specification asks for, None if it has one level, and what goes between hosts.

    >>> split_hosts("hosts:ranks=2+int4:block=64")
    (Hierarchical(inner=Dense(), ranks=2), {'name': 'int4', 'block': '64'})
    """
    if not isinstance(spec, str | Mapping):
        return (Hierarchical(ranks=spec.ranks), spec.inner) if isinstance(spec, Hierarchical) else (None, spec)
    given = dict(parsed(spec) if isinstance(spec, str) else spec)
    if given.get("name") != "hosts":
        return None, spec
    inner = given.pop("inner", "none")
    hosts = compressor(given)
    assert isinstance(hosts, Hierarchical)
    return hosts, inner


def split_option(spec: Spec, name: str) -> tuple[Any, Spec]:
    """Return an option that shards alone know, None if it is not there, and the specification without it.

    >>> split_option("hosts:inside=int8+int4", "inside")
    ('int8', {'name': 'hosts', 'inner': {'name': 'int4'}})
    """
    if not isinstance(spec, str | Mapping):
        return None, spec
    given = dict(parsed(spec) if isinstance(spec, str) else spec)
    return (given.pop(name), given) if name in given else (None, spec)


def shown(hosts: Hierarchical | None, inside: Spec | None, inner: str, send: str | None = None) -> str:
    """Return the text of a specification. `inner`: of what goes between hosts, to which the option `send` is added.

    >>> shown(compressor("hosts:ranks=2"), "int8", "int4"), shown(None, None, "int4:block=64", "weights")
    ('hosts:ranks=2,inside=int8+int4', 'int4:block=64,send=weights')
    """
    inner = _with_option(inner, "send", send)
    return inner if hosts is None else f"{_with_option(specification(hosts), 'inside', inside)}+{inner}"


def _with_option(text: str, name: str, value: Any) -> str:
    return text if value is None else f"{text}{',' if ':' in text else ':'}{name}={value}"


def codec_inside(spec: Spec | None) -> Codec | None:
    """Return the codec of gradients inside a host. Raises ValueError for one that needs a residual, or random numbers."""
    if spec is None:
        return None
    codec, _, _ = codec_of(compressor(spec), spec)
    if codec is not None and (own_traits(codec).draws or not own_traits(codec).keeps_zeros):
        raise ValueError(f"inside a host gradients travel as none, bf16, fp16, int8 or int4, got {spec!r}")
    return codec


def cut_inside(codec: Codec | None, layout: ShardLayout) -> Cut | None:
    """Return the cut of the rows that ranks of a host exchange: one for each of them, of its place on every host."""
    if codec is None:
        return None
    ranks, row, every = layout.whole.ranks, layout.row, layout.on_hosts(1)
    rows = [
        [
            (host * row + first, size)
            for host in range(ranks.hosts)
            for first, size in every.spans[host * ranks.per_host + place]
        ]
        for place in range(ranks.per_host)
    ]
    return cut_shards(codec, rows, ranks.hosts * row, ranks.place, layout.whole.device)


def host_sums(
    grad: Tensor, layout: ShardLayout, codec: Codec | None, cut: Cut | None, told: Tensor | None
) -> Program[tuple[Tensor, Tensor]]:
    """Return the sums over this host's ranks of the rows of this rank's place on every host, (hosts * row,).

    `grad`: a row for each rank, in the order of ranks. `cut`: of `cut_inside`. `told`: True if the gradients of this rank
    are finite; returned is whether those of all of the host's ranks are. What a codec loses here is held back nowhere.
    """
    ranks = layout.whole.ranks
    rows = grad.view(ranks.hosts, ranks.per_host, -1).transpose(0, 1)  # by the rank of this host that sums them
    numel, wide = rows[0].numel(), working_dtype(grad.dtype)
    codec = needed(codec, grad.dtype)
    if codec is None or cut is None:
        sent = grad.new_ones(ranks.per_host, numel + 1)
        sent[:, :-1].unflatten(1, rows.shape[1:]).copy_(rows)
    else:
        size = cut.row_bytes
        sent = torch.ones(ranks.per_host, size + ALIGNMENT, dtype=torch.uint8, device=grad.device)
        sent[:, :size] = 0
        cut.encode(rows.to(wide).reshape(-1), None, sent[:, :size])
    if told is not None:
        sent[:, -1] = told
    del grad, rows
    received = yield AllToAll(sent, "host")
    del sent
    fine = (received[:, -1] != 0).all()
    if codec is None or cut is None:
        return received.sum(0, dtype=wide)[:-1], fine
    sums = torch.empty(numel, dtype=wide, device=received.device)
    cut.decode_own(received[:, :size].unsqueeze(1), sums)
    return sums.mul_(ranks.per_host), fine


def gathered_rows(row: Tensor, per_host: int) -> Program[Tensor]:
    """Return every rank's row, (ranks, *row.shape): each travels once to each other host, and there among its ranks."""
    if per_host == 1:
        return (yield AllGather(row))
    of_hosts = yield AllGather(row, "across")
    of_places = yield AllGather(of_hosts, "host")
    return of_places.transpose(0, 1).flatten(0, 1)
