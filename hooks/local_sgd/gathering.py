"""The meetings of one training, as the rendezvous keeps them: who waits, and when the next meeting is closed.

A site that comes waits until all sites of the last meeting are there, or until its patience ends. Then the meeting is
closed. All that came are in it, and get its record. A site that comes later gets into the next one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .records import BadRecord
from .records import field as checked
from .standing import Claim, is_identity, judge

SITES = 1024  # that wait for a meeting at most
TEXTS = ("id", "name", "setup", "link", "host")  # in the message of a site that comes

Answer = dict[str, Any]


@dataclass(frozen=True)
class Arrival:
    """A site that waits for a meeting since `since`.

    `link`: the name of the connections that it holds from earlier meetings; `host`, `port`: where others reach it.
    `port` 0: it only dials out, to a relay. `met`: the last meeting that it was in. `sites`: how many it waits for in a new
    training, at most `start` seconds. `phase`: seconds that it waits for others in a training that it is in; `grace`: for
    the last ones, once most are there. A site that knows its training from a server that has started anew waits for as many
    as there were.
    """

    id: str
    name: str
    setup: str
    link: str
    host: str
    port: int
    met: int
    sites: int
    phase: float
    grace: float
    start: float
    claim: Claim
    since: float

    @classmethod
    def of(cls, record: Mapping[str, Any], epoch: str, now: float, *, relay: bool = False) -> Arrival:
        """Return what a site's message says. `relay`: sites need not listen. Raises BadRecord."""
        what = "the arrival of a site"
        site, name, setup, link, host = (checked(record, key, str, what) for key in TEXTS)
        same, met = checked(record, "epoch", str, what) == epoch, checked(record, "met", int, what)
        port, sites, known = (checked(record, key, int, what) for key in ("port", "sites", "known"))
        phase, grace, start = (checked(record, key, float, what) for key in ("phase", "grace", "start"))
        claim = Claim(checked(record, "training", str, what), checked(record, "round", int, what))
        if not is_identity(claim.training):
            raise BadRecord(
                f"{what} has the identity of a training, of 16 hexadecimal digits; got {claim.training[:20]!r}"
            )
        if not port and not relay:
            raise BadRecord(
                f"{name} does not listen, and this rendezvous does not relay: start it by --relay, as before"
            )
        if not 0 <= port < 65536 or not 0 < sites <= SITES:
            raise BadRecord(f"{what} has a port from 1 to 65535 and 1 to {SITES} sites; got {port} and {sites}")
        if not same:
            met, sites = 0, min(known, sites) if known > 0 else sites
        return cls(site, name, setup, link, host, port, met, sites, phase, grace, start, claim, now)

    @property
    def shown(self) -> Answer:
        """The fields that other sites learn."""
        return {"id": self.id, "name": self.name, "link": self.link, "host": self.host, "port": self.port}


@dataclass
class Gathering:
    """`number`: of the last meeting; `members`: the sites that were in it, `setup` and `training`: what they share.

    `members` are in the order in which they first came: a newcomer is behind the others, and dials them. `token`: known to
    them alone. `relay`: they connect through the rendezvous. `ended`: the last meeting of a training that has ended, and
    its round.
    """

    relay: bool = False
    number: int = 0
    members: tuple[str, ...] = ()
    token: str = ""
    setup: str = ""
    training: str = ""
    ended: tuple[int, int] = (0, 0)
    waiting: dict[str, Arrival] = field(default_factory=dict)

    @property
    def expected(self) -> frozenset[str]:
        """The sites that the next meeting waits for; none where the training has ended."""
        return frozenset(() if self.ended[0] >= self.number else self.members)

    def add(self, arrival: Arrival) -> None:
        """Have a site wait."""
        if len(self.waiting) >= SITES:
            raise BadRecord(f"{SITES} sites wait already")
        self.waiting[arrival.id] = arrival

    def end(self, meeting: int, number: int) -> None:
        """Note that the training has ended after a meeting, at round `number`."""
        if 0 < meeting <= self.number:
            self.ended = max(self.ended, (meeting, number))

    def review(self, now: float) -> dict[str, Answer]:
        """Return answers to sites that wait no longer, by site: records of a meeting, or errors."""
        missed = [site for site, each in self.waiting.items() if self._missed(each)]
        answers = {site: _error("ended", "", self.ended[1]) for site in missed}
        self._dismiss(answers)
        here = ", ".join(each.name for each in self.waiting.values())
        alone = [each for each in self.waiting.values() if self._late(each, now) and not self._enough(each)]
        others = "the sites of the training there have ended or died, and " if self.expected else ""
        for each in alone:
            said = f"{others}only {len(self.waiting)} of {each.sites} sites came within {each.start:g} s: {here}"
            answers[each.id] = _error("alone", said)
        self._dismiss(answers)
        if any(self._due(each, now) for each in self.waiting.values()):
            answers |= self._close()
            self._dismiss(answers)
        return answers

    def _dismiss(self, answers: Mapping[str, Answer]) -> None:
        for site in answers:
            self.waiting.pop(site, None)

    def _missed(self, arrival: Arrival) -> bool:
        """Return True for a site of a training whose other sites have ended it."""
        return 0 < arrival.met <= self.ended[0]

    def _came(self) -> frozenset[str]:
        return self.expected & self.waiting.keys()

    def _late(self, arrival: Arrival, now: float) -> bool:
        patience = arrival.phase if arrival.id in self.expected else arrival.start
        return now - arrival.since >= patience

    def _enough(self, arrival: Arrival) -> bool:
        return bool(self._came()) or len(self.waiting) >= arrival.sites

    def _due(self, arrival: Arrival, now: float) -> bool:
        """Return True if a site waits no longer: all have come, or its patience has ended."""
        enough = len(self.waiting) >= arrival.sites
        everyone = self.expected <= self._came() if self.expected else enough
        gone = not self._came() and now - arrival.since >= arrival.phase
        late = self._late(arrival, now) or self._most_have_waited(arrival.grace, now)
        return everyone or late or (gone and (enough or self._survives(arrival)))

    def _most_have_waited(self, grace: float, now: float) -> bool:
        """Return True if more than half of the last meeting's sites have been here together for so many seconds."""
        most, came = len(self.expected) // 2, sorted(self.waiting[site].since for site in self._came())
        return most < len(came) and now - came[most] >= grace

    def _survives(self, arrival: Arrival) -> bool:
        """Return True for one of more sites that have the model than were in the last meeting.

        Fewer may be late themselves, while the others are on their way between two meetings.
        """
        known = [each.id for each in self.waiting.values() if each.met > 0 and each.claim.training == self.training]
        return bool(self.training) and arrival.id in known and len(known) > len(self.expected)

    def _close(self) -> dict[str, Answer]:
        """Close the meeting, and return its record for each site, or the reason why a site is not in it."""
        here = dict(self.waiting)
        incumbents = {site for site in self._came() if here[site].met}  # those that have not begun another training
        setup = self.setup if incumbents else next(iter(here.values())).setup
        answers = {site: _error("setup", setup) for site, each in here.items() if each.setup != setup}
        alike = {site: each for site, each in here.items() if site not in answers}
        claims = {site: each.claim for site, each in alike.items()}
        verdict = judge(claims, incumbents, self.training if incumbents else "")
        answers |= {site: _error("refused", reason) for site, reason in verdict.refused.items()}
        members = sorted((site for site in alike if site not in answers), key=self._seniority)
        if not members:
            return answers
        self.number, self.members, self.setup = self.number + 1, tuple(members), setup
        self.training, self.token = verdict.training or f"{secrets.randbits(62):016x}", secrets.token_hex(16)
        record = {
            "kind": "record",
            "number": self.number,
            "training": self.training,
            "round": verdict.round,
            "token": self.token,
            "relay": self.relay,
            "sites": [here[site].shown for site in members],
            "refused": [here[site].name for site in verdict.refused],
        }
        return answers | dict.fromkeys(members, record)

    def _seniority(self, site: str) -> int:
        return self.members.index(site) if site in self.members else len(self.members)

    def deadlines(self, arrival: Arrival) -> Iterator[float]:
        """Return the times at which the wait of a site may end."""
        yield from (arrival.since + seconds for seconds in (arrival.grace, arrival.phase, arrival.start))


def _error(error: str, message: str, number: int = 0) -> Answer:
    return {"kind": "error", "error": error, "message": message, "round": number}
