"""Local SGD between sites, before hosts are rented: the seconds of a round, and the share of time left to compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compress import Compressor, Layout, Ranks
from ..compress.protocol.requests import AllGather, AllReduce, Request
from ..compress.simulate import STEADY, requests_of, work_memory
from ..compress.state.tree import Leaves
from ..ddp_core import layout_of
from ..hooks.internet.relay import PART
from ..hooks.local_sgd.fragment import grouped

EVERY = (4, 8, 16, 32, 64, 128, 256, 500)  # steps between two averages, of which the first that suffices is named
FRAGMENTS = (4, 2, 1)
FREE = 32  # steps between averages up to which twice the steps make up for the loss, in docs/results/local-steps
ROUND_TRIPS = 4  # before a round: a connection with the rendezvous, its proofs in both directions, and the question


@dataclass(frozen=True)
class Wan:
    """The network of each of some sites. `up`, `down`: bytes per second; `round_trip`: seconds to another site and back.

    `relay`: payloads go through a rendezvous that relays, whose own network limits nothing. `round_trip` is to it then.
    """

    sites: int
    up: float
    down: float
    round_trip: float = 0.0
    relay: bool = False

    @property
    def delay(self) -> float:
        """Seconds in which a byte reaches another site."""
        return self.round_trip if self.relay else self.round_trip / 2

    def seconds(self, phase: Phase) -> float:
        """Return the seconds of an exchange.

        A relay passes a frame on once it has all of it: before the first one nothing comes down, and the last one comes
        down when nothing goes up any more.
        """
        if not self.relay:
            return max(phase.up / self.up, phase.down / self.down) + self.delay
        first = min(PART, phase.payload)
        last = phase.payload % PART or first
        before = PART if phase.payload > PART else 0.0  # the frame before the last may still come down, too
        ends = (
            phase.up / self.up + phase.together * last / self.down,
            (phase.up - last) / self.up + phase.together * (before + last) / self.down,
            first / self.up + phase.down / self.down,
        )
        return max(ends) + self.delay


@dataclass(frozen=True)
class Phase:
    """An exchange. `up`, `down`: bytes of a site; `payload`: of one message; `together`: messages that reach it at once."""

    up: float
    down: float
    payload: float
    together: int


@dataclass(frozen=True)
class RoundPlan:
    """A round of one fragment. `up`, `down`: bytes of a site; `seconds`: of all exchanges.

    `state_bytes`: CPU memory that stays between rounds; `work_bytes`: the most that the round takes in addition.
    """

    up: float
    down: float
    seconds: float
    state_bytes: int
    work_bytes: int


@dataclass(frozen=True)
class SitesPlan:
    """Local SGD between sites. `rounds`: of each fragment; `computing`: the share of time in which sites compute."""

    every: int
    rounds: Sequence[RoundPlan]
    computing: float

    @property
    def delay(self) -> int:
        """Steps from computing a change to applying its average."""
        return self.every // len(self.rounds)

    @property
    def state_bytes(self) -> int:
        """CPU memory that a site keeps between rounds: anchor, outer momentum and residuals."""
        return sum(each.state_bytes for each in self.rounds)

    @property
    def work_bytes(self) -> int:
        """The most CPU memory that a round takes in addition. A site that joins takes another 8 bytes per parameter."""
        return max(each.work_bytes for each in self.rounds)


def round_plan(compressor: Compressor, parameters: Mapping[str, Tensor], wan: Wan) -> RoundPlan:
    """Compute a round of a fragment with these parameters, by a dry run.

    Arithmetic, and the growth of a TCP connection's window, are not counted.
    """
    place = layout_of(parameters, torch.float32, torch.device("meta"), Ranks(wan.sites))
    phases = [phase for request in requests_of(compressor, place, STEADY) for phase in _phases(request, wan)]
    seconds = sum(map(wan.seconds, phases))
    waits = ROUND_TRIPS * wan.round_trip + wan.delay  # of the sites' reports, which are small
    up, down = sum(each.up for each in phases), sum(each.down for each in phases)
    return RoundPlan(up, down, seconds + waits, *_memory(compressor, place))


def _memory(compressor: Compressor, place: Layout) -> tuple[int, int]:
    """Return the bytes that a fragment keeps between rounds, and those that its round takes in addition.

    A round begins with a copy of the parameters, their difference from the anchor and its part in the average. Until it ends
    there are the residuals from before it, too.
    """
    flat, kept = place.numel * place.dtype.itemsize, Leaves(compressor.init(place)).nbytes
    return 2 * flat + kept, 3 * flat + kept + work_memory(compressor, place).most


def _phases(request: Request, wan: Wan) -> Iterable[Phase]:
    """Yield each exchange that a request needs between sites."""
    size = float(request.tensor.nbytes)
    if isinstance(request, AllGather):
        yield _gathered(size, wan)
        return
    row = size / wan.sites
    yield Phase(row * (wan.sites - 1), row * (wan.sites - 1), row, 1)  # each site sends to another one first
    if isinstance(request, AllReduce):  # each site has summed a part, which the others get
        yield _gathered(row, wan)


def _gathered(size: float, wan: Wan) -> Phase:
    """Return the exchange in which each site sends a payload to all others."""
    others = wan.sites - 1
    return Phase(size * (1 if wan.relay else others), size * others, size, others)


def computing_share(every: int, fragments: int, step: float, seconds: float, *, overlap: bool = True) -> float:
    """Return the share of time that is spent on steps of `step` seconds, where a fragment's round takes `seconds`.

    >>> computing_share(32, 4, 0.5, 4.0), computing_share(32, 4, 0.5, 8.0), computing_share(32, 4, 0.5, 4.0, overlap=False)
    (1.0, 0.5, 0.5)
    """
    steps = every // fragments * step
    return steps / (max(steps, seconds) if overlap else steps + seconds)


def sites_plan(
    compressor: Compressor, parameters: Mapping[str, Tensor], wan: Wan, step: float, target: float
) -> SitesPlan:
    """Return the fewest steps between averages with which sites compute for at least `target` of the time.

    Where none suffices, it is the plan that computes most. `step`: seconds of a step. `parameters` may be on the meta
    device.
    """
    plans = []
    for count in FRAGMENTS:
        rounds = round_plans(compressor, parameters, wan, count)
        for every in EVERY:
            shares = [computing_share(every, len(rounds), step, each.seconds) for each in rounds]
            plans.append(SitesPlan(every, rounds, len(shares) / sum(1 / share for share in shares)))
    enough = [each for each in plans if each.computing >= target]
    if not enough:
        return max(plans, key=lambda each: each.computing)
    return min(enough, key=lambda each: (each.every, -len(each.rounds)))


def round_plans(compressor: Compressor, parameters: Mapping[str, Tensor], wan: Wan, count: int) -> list[RoundPlan]:
    """Compute the rounds of all fragments, of which there are at most `count`."""
    return [round_plan(compressor, part, wan) for part in grouped(parameters, count).values()]


def recommended(plans: Sequence[SitesPlan]) -> int:
    """Return the place of the plan to use: of those with at most FREE steps between averages the one with the least delay.

    Where there is none, it is the one with the fewest steps between averages. The first one wins a tie.
    """
    free = [place for place, each in enumerate(plans) if each.every <= FREE]
    if free:
        return min(free, key=lambda place: plans[place].delay)
    return min(range(len(plans)), key=lambda place: (plans[place].every, -plans[place].computing))
