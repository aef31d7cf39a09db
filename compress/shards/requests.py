"""The requests of FSDP2's shards, by programs on the meta device. Advice for the log where `hosts+` sends less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..builder.sent_in_vain import of_hosts
from ..protocol.card_traffic import card_bytes
from ..protocol.layout import Layout, Ranks
from ..protocol.requests import AllGather, Program, Request
from ..simulate import requests_in
from .layout import ShardLayout
from .reduction import ShardSum
from .weights import HeldWeights, OwnRows, WeightGather, WeightKind

META = torch.device("meta")
SHARD = 1024, 1024


def gather_program(layout: ShardLayout, weights: WeightGather, dtype: torch.dtype) -> Program[Tensor] | None:
    """Return the program of a module's gather; None where torch gathers it, also if it has no more bits than the codec."""
    kind = WeightKind(dtype, layout)
    if kind.cut(weights.codec) is None and weights.per_host == 1:
        return None
    row = torch.empty(layout.row, dtype=dtype, device=META)
    rows = row.expand(layout.whole.ranks.world_size, -1).clone() if weights.differences else None
    held = None if rows is None else HeldWeights(rows_of_step(layout), rows)
    return weights.gather(row, torch.empty(layout.numel, dtype=dtype, device=META), kind, held)


def rows_of_step(layout: ShardLayout) -> OwnRows:
    """Return rows as they are after a step, with room for those of the next one."""
    own = OwnRows.empty(layout)
    own.update()
    own.keep()
    return own


def reduce_program(layout: ShardLayout, reduction: ShardSum, dtype: torch.dtype) -> Program[Tensor]:
    """Return the program of the reduction of a module's gradients."""
    grad, out = (torch.empty(elements, dtype=dtype, device=META) for elements in (layout.numel, layout.row))
    return reduction.reduce(grad, reduction.init(layout), out)


def gather_requests(layout: ShardLayout, weights: WeightGather, dtype: torch.dtype) -> Iterator[Request]:
    """Yield the requests of a module's gather."""
    program = gather_program(layout, weights, dtype)
    if program is None:
        yield AllGather(torch.empty(layout.row, dtype=dtype, device=META))
    else:
        yield from requests_in(program, replace(layout.whole.ranks, per_host=weights.per_host))


def reduce_requests(layout: ShardLayout, reduction: ShardSum, dtype: torch.dtype) -> Iterator[Request]:
    """Yield the requests of the reduction of a module's gradients."""
    ranks = replace(layout.whole.ranks, per_host=reduction.per_host)
    yield from requests_in(reduce_program(layout, reduction, dtype), ranks)


def shards_sent_in_vain(weights: WeightGather, reduction: ShardSum, ranks: Ranks) -> Iterator[str]:
    """Yield a sentence for weights and one for gradients that travel once a rank of a host, where `hosts+` sends less.

    Args:
        weights: the gather of weights, as it is placed.
        reduction: the sum of gradients, as it is placed.
        ranks: the ranks that share parameters, on their hosts.
    """
    if not 1 < ranks.per_host < ranks.world_size:
        return
    first, both = SHARD[0] * ranks.world_size, (1, ranks.per_host)
    whole = Layout(("matrix",), ((first, *SHARD[1:]),), torch.float32, META, replace(ranks, per_host=1))
    layout = ShardLayout(whole, (0,))
    if weights.per_host == 1:
        gathers = (gather_requests(layout, weights.placed(each, ranks.world_size), whole.dtype) for each in both)
        yield from of_hosts(f"gather=hosts+{weights}", _through_card(gathers, ranks), ranks)
    if reduction.per_host == 1:
        sums = (reduce_requests(layout, reduction.placed(each, ranks.world_size), whole.dtype) for each in both)
        yield from of_hosts(f"reduce=hosts+{reduction}", _through_card(sums, ranks), ranks)


def _through_card(several: Iterable[Iterable[Request]], ranks: Ranks) -> list[float]:
    return [card_bytes(requests, ranks, rings=True) for requests in several]
