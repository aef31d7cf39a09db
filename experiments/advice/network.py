"""The cost of each kind of collective that a compressor asks for, timed on the ranks of the training."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.protocol.layout import Scope
from ...compress.protocol.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request
from ...ddp_core import exchange
from ...ddp_core.measure.step_model import LinkCost
from ...ddp_core.transport.protocol import Transport

Kind: TypeAlias = tuple[type, torch.dtype, Scope]  # of requests
SMALLEST, GROWTH = 2**14, 8  # bytes of a payload at least, and how many times larger the next one is
LONG = 0.25  # seconds of a collective: larger ones are not tried
REPEATS = 3


@dataclass(frozen=True)
class KindCost:
    """Seconds of a kind of collective by the bytes that a rank sends, and the cores that are busy meanwhile, a rank."""

    link: LinkCost
    cores: float

    def later(self, seconds: float) -> KindCost:
        """The same with another latency, by so many seconds, but not below 0."""
        return replace(self, link=replace(self.link, alpha=max(0.0, self.link.alpha + seconds)))


FREE = KindCost(LinkCost(0.0, 0.0), 0.0)


def messages(form: type, ranks: int, *, rings: bool) -> int:
    """Return the number of successive messages in a collective, in `rings` or else in trees. An all-reduce is two in one.

    >>> messages(AllReduce, 4, rings=True), messages(AllGather, 4, rings=True), messages(AllReduce, 1024, rings=False)
    (6, 3, 20)
    """
    return (2 if form is AllReduce else 1) * (ranks - 1 if rings else (ranks - 1).bit_length())


def kind_of(request: Request) -> Kind:
    """Return the kind of a request, by which its cost is stored."""
    return type(request), request.tensor.dtype, request.scope


class Network:
    """Times collectives over the transport that gradients take. All ranks make the same calls."""

    def __init__(self, transport: Transport, device: torch.device, timeout: timedelta, per_host: int = 1) -> None:
        self._transport, self._device, self._timeout = transport, device, timeout
        self._group = transport.group
        self._kept: Tensor | None = None
        transport.arrange(per_host)

    def costs(self, largest: Mapping[Kind, int]) -> dict[Kind, KindCost]:
        """Return the cost of each kind, given the bytes of its largest payload."""
        self._transport.open(1, [{scope for _, _, scope in largest}])
        return {kind: self._cost(kind, payload) for kind, payload in largest.items()}

    def _cost(self, kind: Kind, payload: int) -> KindCost:
        samples: list[tuple[float, float]] = []
        processor, seconds = 0.0, 0.0
        for size in _sizes(payload):
            for sent, found, worked in self._timed(kind, size):
                samples.append((max(sent, 1.0), found))
                processor, seconds = processor + worked, seconds + found
            if samples[-1][1] > LONG:
                break
        return KindCost(fitted(samples), 0.0 if self._device.type == "cuda" else processor / seconds)

    def _timed(self, kind: Kind, size: int) -> list[tuple[float, float, float]]:
        """(bytes sent, seconds until the last rank had its reply, a rank's processor's seconds) of some collectives."""
        mine, sent = [], 0.0
        for _ in range(1 + REPEATS):
            request = self._request(kind, size)
            sent = request.sent_bytes(len(self._transport.ranks.members(kind[2])))
            dist.barrier(self._group)
            began, worked = time.perf_counter(), time.process_time()
            self._transport.start(request, 0).wait(self._timeout)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            mine.append((time.perf_counter() - began, time.process_time() - worked))
        ranks = [json.loads(text) for text in exchange(json.dumps(mine[1:]), self._transport)]
        return [
            (sent, max(seconds for seconds, _ in turn), statistics.mean(worked for _, worked in turn))
            for turn in zip(*ranks, strict=True)
        ]

    def _request(self, kind: Kind, payload: int) -> Request:
        """One of a kind with about so many bytes, of zeros."""
        form, dtype, scope = kind
        members = len(self._transport.ranks.members(scope))
        row = max(1, payload // dtype.itemsize // (members if form is not AllGather or scope == "host" else 1))
        whole = torch.zeros(members * row, dtype=dtype, device=self._device)
        if form is AllGather and scope == "host":  # of a share of the sums
            scattered = ReduceScatter(self._room(whole), "sum", scope, (row,) * members)
            share = self._transport.start(scattered, 0).wait(self._timeout)
            return AllGather(share, scope, scattered.sizes, within=scattered.tensor)
        if form is AllGather:
            return AllGather(whole[:row].clone(), scope)
        if form is AllToAll:
            return AllToAll(whole.view(members, row), scope)
        if form is ReduceScatter:
            return ReduceScatter(self._room(whole), "sum", scope, (row,) * members)
        return AllReduce(self._room(whole), "sum", scope)

    def _room(self, tensor: Tensor) -> Tensor:
        """Memory like a tensor's, where a bucket of its own would lie: the same each time, as in training, or it would be
        mapped page by page while a collective is timed.
        """
        kept = self._kept
        if kept is None or (kept.dtype, kept.numel()) != (tensor.dtype, tensor.numel()):
            room = self._transport.allocate([[tensor]])[0] if self._transport.allocates else None
            self._kept = kept = tensor if room is None else room
        return kept


def fitted(samples: Sequence[tuple[float, float]]) -> LinkCost:
    """From (bytes sent, seconds) of some sizes. The latency is the least of the smallest size: there bytes take the least,
    and what else the machine does now and then is in the others.

    >>> fitted([(1, 3.0), (1, 2.0), (1, 9.0), (3, 4.0), (3, 4.0)])
    LinkCost(alpha=1.5, beta=0.5)
    """
    found = LinkCost.fitted(samples)
    smallest = min(sent for sent, _ in samples)
    left = min(seconds - found.beta * sent for sent, seconds in samples if sent == smallest)
    return replace(found, alpha=max(0.0, left))


def _sizes(payload: int) -> list[int]:
    """Return payload sizes to time, in bytes, up to the largest. They are at least two, to separate latency from rate: the
    largest that is tried is not small.

    >>> _sizes(100), _sizes(2**22)
    ([16384, 131072], [65536, 524288, 4194304])
    """
    sizes = [max(payload, SMALLEST * GROWTH)]
    while sizes[-1] >= SMALLEST * GROWTH:
        sizes.append(sizes[-1] // GROWTH)
    return sizes[::-1]
