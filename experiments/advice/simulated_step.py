"""A replay of a step: computation, copies, each round's arithmetic and transfer, on cores that they share.

Runs as the engine does: one thread computes, a lane a round does the arithmetic of all buckets in their order, and one link
carries what was sent first, first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .shared_cores import Event, Machine, Process, Work

NOTHING = Work()


@dataclass(frozen=True)
class Round:
    """Arithmetic, then a request. `wire`: while it holds the link; `latency`: seconds from its end until the reply is used,
    in which others may hold the link. `in_host`: it goes through memory, and holds no link.
    """

    arithmetic: Work
    wire: Work
    latency: float = 0.0
    in_host: bool = False


@dataclass(frozen=True)
class Parcel:
    """A bucket or slice on its way through a step.

    `ready`: seconds of backward until its last gradient is there; `needed`: seconds of forward until that uses it.
    `copy`: into the bucket, by backward's thread, and out of it where all is waited for. `decode`: after the last reply.
    `update`: of its parameters.
    """

    ready: float
    needed: float
    copy: Work
    rounds: tuple[Round, ...]
    decode: Work = NOTHING
    update: Work = NOTHING

    @property
    def encode(self) -> float:
        """Seconds of arithmetic in all rounds, where nothing else runs."""
        return self.decode.seconds + sum(each.arithmetic.seconds for each in self.rounds)


@dataclass(frozen=True)
class Pipeline:
    """A step. `parcels`: in the order in which they leave. `cores`: this rank's share of the machine's. `under_way`: how
    many requests of a round may wait for their replies at once; None is any number.
    """

    forward: Work
    backward: Work
    parcels: tuple[Parcel, ...]
    cores: float
    under_way: int | None = None

    def seconds(self, *, until_needed: bool = False) -> float:
        """From the beginning of a backward to that of the next.

        `until_needed`: forward waits for each parcel where it uses it, and updates it there; else for all at backward's end.
        """
        machine = Machine(self.cores)
        travels = [Travel(parcel, machine) for parcel in self.parcels]
        link = SimulatedLink(machine)
        machine.start(_computes(self, travels, until_needed=until_needed))
        for lane in range(1 + max((len(parcel.rounds) for parcel in self.parcels), default=0)):
            machine.start(_lane(lane, travels, link, self.under_way or len(travels)))
        machine.run()
        return machine.now


class Travel:
    """A parcel under way: when it has left, when each round's reply is there, when its average is."""

    def __init__(self, parcel: Parcel, machine: Machine) -> None:
        self.parcel = parcel
        self.left, self.averaged = Event(machine), Event(machine)
        self.replies = [Event(machine) for _ in parcel.rounds]


class SimulatedLink:
    """A network link, first come, first served."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._free = machine, Event(machine)
        self._free.happen()
        self._always = self._free

    def send(self, request: Round, reply: Event) -> None:
        """Behind all that was sent before, or at once in a host."""
        before, done = self._always, Event(self._machine)
        if not request.in_host:
            before, self._free = self._free, done
        self._machine.start(_transfer(request, before, done, reply))


def _transfer(request: Round, before: Event, done: Event, reply: Event) -> Process:
    yield before
    yield request.wire
    done.happen()
    yield Work(request.latency)
    reply.happen()


def _computes(step: Pipeline, travels: Sequence[Travel], *, until_needed: bool) -> Process:
    """The thread that computes."""
    yield from _backward(step, travels)
    done = 0.0
    if not until_needed:
        for travel in travels:
            yield travel.averaged
            yield travel.parcel.copy
    for travel in sorted(travels, key=lambda each: each.parcel.needed):
        if until_needed:
            yield Work(travel.parcel.needed - done, step.forward.cores)
            done = travel.parcel.needed
        yield travel.averaged
        yield travel.parcel.update
    yield Work(step.forward.seconds - done, step.forward.cores)


def _backward(step: Pipeline, travels: Sequence[Travel]) -> Process:
    """Gradients get ready; a parcel leaves once it is complete and all before it have left."""
    done, left = 0.0, 0
    complete: set[Travel] = set()
    for travel in sorted(travels, key=lambda each: each.parcel.ready):
        yield Work(travel.parcel.ready - done, step.backward.cores)
        yield travel.parcel.copy
        done = travel.parcel.ready
        complete.add(travel)
        while left < len(travels) and travels[left] in complete:
            travels[left].left.happen()
            left += 1
    yield Work(step.backward.seconds - done, step.backward.cores)


def _lane(number: int, travels: Sequence[Travel], link: SimulatedLink, under_way: int) -> Process:
    """Ends round `number` - 1 of all parcels and starts their round `number`, in their order."""
    sent: list[Event] = []
    for travel in travels:
        rounds = travel.parcel.rounds
        if number > len(rounds):
            continue
        yield travel.replies[number - 1] if number else travel.left
        if number < len(rounds):
            yield rounds[number].arithmetic
            if len(sent) >= under_way:
                yield sent[-under_way]  # replies come in the order of requests, but for those in a host
            sent.append(travel.replies[number])
            link.send(rounds[number], sent[-1])
        else:
            yield travel.parcel.decode
            travel.averaged.happen()
