"""The bytes that go through the network card of a host."""

from __future__ import annotations

from ...compress import Ranks
from ...compress.protocol.requests import AllReduce, AllToAll
from .network import Kind

TRAVELS = ("all", "across")  # scopes of requests that leave a host


def through_card(kind: Kind, ranks: Ranks, *, rings: bool) -> float:
    """Return the bytes that leave a host through its network card, for each byte that one of its ranks sends.

    A ring through all ranks leaves a host once. `rings` False: all-reduces follow a tree of hosts, as NCCL's may. In an
    all-to-all each rank of the host sends to all ranks elsewhere.

    >>> import torch
    >>> kind = (AllReduce, torch.float32, "all")
    >>> through_card(kind, Ranks(16, 0, 8), rings=True), round(through_card(kind, Ranks(16, 0, 8), rings=False), 3)
    (1.0, 0.533)
    >>> through_card((AllToAll, torch.int8, "all"), Ranks(16, 0, 8), rings=True)
    4.266666666666667
    """
    form, _, scope = kind
    if ranks.hosts == 1 or scope not in TRAVELS:
        return 0.0
    if scope == "across":
        return float(ranks.per_host)
    if form is AllToAll:
        return ranks.per_host * (ranks.world_size - ranks.per_host) / (ranks.world_size - 1)
    if form is AllReduce and not rings:
        return (1 - 1 / ranks.hosts) / (1 - 1 / ranks.world_size)
    return 1.0
