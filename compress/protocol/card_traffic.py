"""The bytes that go through the network card of a host."""

from __future__ import annotations

from collections.abc import Iterable

from .layout import Ranks, Scope
from .requests import AllReduce, AllToAll, Request

TRAVELS = ("all", "across")  # scopes of requests that leave a host


def through_card(form: type, scope: Scope, ranks: Ranks, *, rings: bool) -> float:
    """Return the bytes that leave a host through its network card, for each byte that one of its ranks sends.

    A ring through all ranks leaves a host once. `rings` False: all-reduces follow a tree of hosts, as NCCL's may. In an
    all-to-all each rank of the host sends to all ranks elsewhere.

    >>> ranks = Ranks(16, 0, 8)
    >>> through_card(AllReduce, "all", ranks, rings=True), round(through_card(AllReduce, "all", ranks, rings=False), 3)
    (1.0, 0.533)
    >>> through_card(AllToAll, "all", ranks, rings=True)
    4.266666666666667
    """
    if ranks.hosts == 1 or scope not in TRAVELS:
        return 0.0
    if scope == "across":
        return float(ranks.per_host)
    if form is AllToAll:
        return ranks.per_host * (ranks.world_size - ranks.per_host) / (ranks.world_size - 1)
    if form is AllReduce and not rings:
        return (1 - 1 / ranks.hosts) / (1 - 1 / ranks.world_size)
    return 1.0


def card_bytes(requests: Iterable[Request], ranks: Ranks, *, rings: bool) -> float:
    """Return the bytes that leave a host if each of its ranks makes these requests; `rings` as for `through_card`.

    >>> import torch
    >>> request = AllToAll(torch.empty(16, 1, dtype=torch.uint8), "all")
    >>> round(card_bytes([request], Ranks(16, 0, 8), rings=False))
    64
    """
    return sum(
        each.sent_bytes(len(ranks.members(each.scope))) * through_card(type(each), each.scope, ranks, rings=rings)
        for each in requests
    )
