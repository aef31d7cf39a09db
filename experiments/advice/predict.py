"""The time of a step with a compressor, an order and a number of hosts, predicted from measurements of its parts."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from torch import Tensor

from ...compress import Layout, Ranks, compressor
from ...compress.protocol.card_traffic import TRAVELS, through_card
from ...compress.protocol.compressor import unnamed
from ...compress.protocol.layout import Scope
from ...compress.protocol.requests import AllGather
from ...compress.simulate import STEADY, requests_of
from ...compress.state.shares import ranks_seen
from ...ddp_core.measure.link_schedule import optimal, priority_order
from ...ddp_core.measure.step_model import Piece, StepModel
from ..bucket_plan import bucket_layouts, state_bytes, work_bytes
from .arithmetic import Arithmetic
from .candidates import PRIORITY
from .network import FREE, Kind, KindCost, kind_of, messages
from .shared_cores import Work
from .simulated_step import Parcel, Pipeline, Round
from .slice_sizes import gradient_mb, parts_of
from .timed_training import Computation

STEPS = (STEADY, STEADY + 1)  # a method may alternate


@dataclass(frozen=True)
class Measured:
    """The parts of a step that predictions rest on, of `ranks`: measured by `advise`, or assumed.

    `copy`: seconds an element, into buckets. `cores`: of a machine, for each of its ranks. `rings`: messages of a
    collective follow each other around a ring, as Gloo's do, else as in trees. `by_need`: overlapped slices go in the
    order in which they are needed. `launches`: seconds of the host to launch a step on a GPU. `bus`: the link is a bus that
    requests inside a host hold, too.
    """

    computation: Computation
    parameters: Mapping[str, Tensor]
    arithmetic: Mapping[str, Arithmetic]
    costs: Mapping[Kind, KindCost]
    copy: float
    ranks: Ranks
    cores: float
    rings: bool
    by_need: bool
    launches: float = 0.0
    bus: bool = False


@dataclass(frozen=True)
class Sent:
    """A request of a bucket: its kind, its payload and the bytes that leave a rank."""

    kind: Kind
    payload_bytes: int
    sent_bytes: float

    @property
    def travels(self) -> bool:
        """True if the request leaves the host."""
        return self.kind[2] in TRAVELS


@dataclass(frozen=True)
class Prediction:
    """A step in seconds, and the least that any order of sending allows (forward, backward and wire alone, no optimizer).

    `computation`: seconds of a step that never communicates. `encode`: seconds of a rank's compression, hidden or not.
    `host`: seconds that the step waits for launches. `network`: seconds that the link is held. `card_bytes`: sent through
    the network card of a host.
    """

    step: float
    bound: float
    sent_bytes: float
    computation: float = 0.0
    encode: float = 0.0
    host: float = 0.0
    network: float = 0.0
    card_bytes: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds of communication and compression that computation does not hide."""
        return self.step - self.computation - self.host


def predicted(measured: Measured, spec: str, order: str, ranks: Ranks, bucket_mb: float | None = None) -> Prediction:
    """Predict a step with a compressor on `ranks`, after warm-up.

    `order`: "backward" as of DDP, which waits at backward's end, or "priority" as of gradwire.overlap.
    """
    overlaps = order == PRIORITY
    layouts, cuts = buckets(measured, spec, ranks, bucket_mb, overlaps=overlaps)
    parcels, travelling = list[Parcel](), list[Sent]()
    for layout, parts in zip(layouts, cuts, strict=True):
        requests = requests_on(spec, layout)
        parcel = _parcel(measured, spec, layout, requests, ranks, parts)
        parcels += [parcel] * parts
        travelling += [request for request in requests if request.travels]
    computation, bound = measured.computation, optimal(_by_parameters(measured, layouts, cuts, parcels))
    if overlaps and measured.by_need:
        parcels = [parcels[place] for place in priority_order(_model(computation, parcels))]
    step = Pipeline(computation.forward, computation.backward, tuple(parcels), measured.cores)
    sent_bytes = sum(request.sent_bytes for request in travelling)
    card_bytes = sum(
        each.sent_bytes * through_card(each.kind[0], each.kind[2], ranks, rings=measured.rings) for each in travelling
    )
    encode = sum(parcel.encode for parcel in parcels)
    launches = measured.launches + measured.arithmetic[spec].launches * len(parcels)
    # the host waits where a GPU does its work faster than that is launched
    host = max(0.0, launches - computation.seconds - encode) if measured.launches else 0.0
    seconds = step.seconds(until_needed=overlaps) + host
    network = sum(map(_wire, parcels))
    return Prediction(seconds, bound, sent_bytes, computation.seconds, encode, host, network, card_bytes)


def memory(measured: Measured, spec: str, order: str, ranks: Ranks, bucket_mb: float | None) -> tuple[int, int]:
    """Return the bytes that a compressor keeps on a rank between steps, and takes at most, the latter with whole buckets."""
    layouts, _ = buckets(measured, spec, ranks, bucket_mb, overlaps=order == PRIORITY)
    whole, _ = buckets(measured, spec, ranks, bucket_mb, overlaps=False)
    return state_bytes(compressor(spec), layouts), peak_bytes(spec, tuple(whole))


@functools.lru_cache(maxsize=4096)
def peak_bytes(spec: str, layouts: tuple[Layout, ...]) -> int:
    """Return the most memory that a compressor takes on a rank, state and work, as `plan` does."""
    built = compressor(spec)
    return state_bytes(built, layouts) + work_bytes(built, layouts)


def buckets(
    measured: Measured, spec: str, ranks: Ranks, bucket_mb: float | None, *, overlaps: bool
) -> tuple[list[Layout], list[int]]:
    """The buckets that DistributedDataParallel makes, with overlap of the size of slices, and how many slices each has."""
    ready = {name: measured.parameters[name] for name in measured.computation.ready}
    if not overlaps:
        layouts = bucket_layouts(ready, bucket_mb, ranks_seen(compressor(spec), ranks))
        return layouts, [1] * len(layouts)
    cut_mb = gradient_mb(spec, ranks, ready.values())
    layouts = bucket_layouts(ready, cut_mb, ranks_seen(compressor(spec), ranks))
    return layouts, [parts_of(spec, layout, cut_mb) for layout in layouts]


@functools.lru_cache(maxsize=4096)
def requests_on(spec: str, layout: Layout) -> tuple[Sent, ...]:
    """Return a step's requests on a bucket, by round. `sent_bytes` are the mean of two steps, as some alternate."""
    return _requests_on(spec, *unnamed(compressor(spec), [layout]))


@functools.lru_cache(maxsize=4096)
def _requests_on(spec: str, layout: Layout) -> tuple[Sent, ...]:
    steps = [list(requests_of(compressor(spec), layout, step)) for step in STEPS]
    found: list[Sent] = []
    for requests in zip_longest(*steps):  # a step may have fewer rounds than another
        asked = [each for each in requests if each is not None]
        sent = sum(each.sent_bytes(len(layout.ranks.members(each.scope))) for each in asked) / len(steps)
        found.append(Sent(kind_of(asked[0]), asked[0].tensor.nbytes, sent))
    return tuple(found)


def _parcel(
    measured: Measured, spec: str, layout: Layout, requests: Sequence[Sent], ranks: Ranks, parts: int
) -> Parcel:
    """One of the slices of a bucket, or all of it."""
    arithmetic, elements = measured.arithmetic[spec], layout.numel / parts
    *before, last = (Work(seconds * elements, arithmetic.cores) for seconds in arithmetic.phases)
    rounds = []
    for work, request in zip(before, requests, strict=False):  # on one host `hosts+` has fewer rounds than measured
        cost = _cost(measured, request.kind, ranks)
        wire = Work(cost.link.beta * request.sent_bytes / parts, cost.cores)
        rounds.append(Round(work, wire, cost.link.alpha, in_host=not (request.travels or measured.bus)))
    computation = measured.computation
    optimizer, share = computation.optimizer, elements / _elements(measured)
    return Parcel(
        ready=max(computation.ready[name] for name in layout.names),
        needed=min(computation.needed[name] for name in layout.names),
        copy=Work(measured.copy * elements, 1.0),
        rounds=tuple(rounds),
        # of a rank's arithmetic this alone goes over what all ranks have sent
        decode=replace(last, seconds=last.seconds * _grown(measured.ranks, spec, layout, ranks)),
        update=Work(optimizer.seconds * share, optimizer.cores),
    )


def _grown(measured: Ranks, spec: str, layout: Layout, ranks: Ranks) -> float:
    """Return the bytes that a bucket's decoding reads in `ranks`, divided by the bytes where it was measured."""
    if ranks == measured:
        return 1.0
    before = replace(layout, ranks=ranks_seen(compressor(spec), measured))
    now, then = _gathered(requests_on(spec, before), measured), _gathered(requests_on(spec, layout), ranks)
    return then / now if now else 1.0


def _gathered(requests: Sequence[Sent], ranks: Ranks) -> int:
    """Return the bytes that all-gathers over the network bring a rank: it decodes those of every rank."""
    gathers = (each for each in requests if each.kind[0] is AllGather and each.travels)
    return sum(len(ranks.members(each.kind[2])) * each.payload_bytes for each in gathers)


def _elements(measured: Measured) -> int:
    return sum(parameter.numel() for parameter in measured.parameters.values())


def _cost(measured: Measured, kind: Kind, ranks: Ranks) -> KindCost:
    """Return the cost of a kind of collective between the ranks that take part in it."""
    now, then = (len(each.members(kind[2])) for each in (measured.ranks, ranks))
    if then == 1:
        return FREE
    more = messages(kind[0], then, rings=measured.rings) - messages(kind[0], now, rings=measured.rings)
    return measured.costs[kind].later(more * _message(measured, kind[2]))


def _message(measured: Measured, scope: Scope) -> float:
    """Seconds of latency of a message between the ranks of a scope: the median of all kinds of collectives, each of which
    was measured with its own luck, which many messages would multiply.
    """
    members = len(measured.ranks.members(scope))
    return statistics.median(
        cost.link.alpha / max(1, messages(form, members, rings=measured.rings))
        for (form, _, its), cost in measured.costs.items()
        if its == scope
    )


def _model(computation: Computation, parcels: Sequence[Parcel]) -> StepModel:
    """Computation and wire alone."""
    pieces = (Piece(parcel.ready, _wire(parcel), parcel.needed) for parcel in parcels)
    return StepModel(computation.forward.seconds, computation.backward.seconds, tuple(pieces))


def _by_parameters(
    measured: Measured, layouts: Sequence[Layout], cuts: Sequence[int], parcels: Sequence[Parcel]
) -> StepModel:
    """The same with a piece for each parameter, which has its part of its bucket's wire: the bound is over all buckets."""
    computation, pieces, place = measured.computation, list[Piece](), 0
    for layout, parts in zip(layouts, cuts, strict=True):
        wire = parts * _wire(parcels[place])
        place += parts
        for name, size in zip(layout.names, layout.sizes, strict=True):
            pieces.append(Piece(computation.ready[name], wire * size / layout.numel, computation.needed[name]))
    return StepModel(computation.forward.seconds, computation.backward.seconds, tuple(pieces))


def _wire(parcel: Parcel) -> float:
    return sum(each.wire.seconds for each in parcel.rounds if not each.in_host)
