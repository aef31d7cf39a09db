"""The meetings of one training, as the rendezvous keeps them: who waits, and when the next meeting is closed.

The voters are the sites of the last meeting that had a majority. Once more than half of them are there, the others have
`grace`. Exactly half of them, with the one that came first, wait a third of `limit`. A minority waits the whole `limit`,
then continues by itself: a training whose other sites died must go on. The voters stay the same meanwhile, so that the
others return to their own model, until another `limit` has passed. Then the minority is the training.

All that came are in the meeting, and get its record. A site that comes later gets into the next one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .late_sites import Claim, is_identity, judge
from .records import BadRecord, Site, site_of
from .records import field as checked

PHASES = 3  # of a round's limit: waiting for others, the round itself, meeting again without those that it lost
SITES = 1024  # that wait for a meeting at most

Answer = dict[str, Any]


@dataclass(frozen=True)
class Arrival(Site):
    """A site that waits for a meeting since `since`.

    `met`: the last meeting that it was in. `sites`: how many it waits for in a new
    training, at most `start` seconds. `phase`: a third of the limit of its rounds, in seconds; `grace`: its wait for the
    last sites of its training, once most are there. A site that knows its training from a server that has started anew waits
    for as many as there were.
    """

    setup: str
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
        site, setup = site_of(record, what), checked(record, "setup", str, what)
        same, met = checked(record, "epoch", str, what) == epoch, checked(record, "met", int, what)
        sites, known = (checked(record, key, int, what) for key in ("sites", "known"))
        phase, grace, start = (checked(record, key, float, what) for key in ("phase", "grace", "start"))
        claim = Claim(checked(record, "training", str, what), checked(record, "round", int, what))
        if not is_identity(claim.training):
            raise BadRecord(
                f"{what} has the identity of a training, of 16 hexadecimal digits; got {claim.training[:20]!r}"
            )
        if not site.port and not relay:
            raise BadRecord(
                f"{site.name} does not listen, and this rendezvous does not relay: start it by --relay, as before"
            )
        if not 0 <= site.port < 65536 or not 0 < sites <= SITES:
            raise BadRecord(f"{what} has a port from 1 to 65535 and 1 to {SITES} sites; got {site.port} and {sites}")
        if not same:
            met, sites = 0, min(known, sites) if known > 0 else sites
        place = site.id, site.name, site.link, site.host, site.port
        return cls(*place, setup, met, sites, phase, grace, start, claim, now)


@dataclass
class Gathering:
    """`number`: of the last meeting; `members`: the sites that were in it, `setup` and `training`: what they share.

    `members` are in the order in which they first came: a newcomer is behind the others, and dials them. `voters`: the sites
    of the last meeting that had a majority, in this order, and `majority`: its number. `apart`: sites of later meetings,
    which a minority has had since `apart_since`. `token`: known to the members alone. `relay`: they connect through the
    rendezvous. `ended`: the last meeting of a training that has ended, and its round.
    """

    relay: bool = False
    number: int = 0
    members: tuple[str, ...] = ()
    voters: tuple[str, ...] = ()
    majority: int = 0
    apart: frozenset[str] = frozenset()
    apart_since: float | None = None
    token: str = ""
    setup: str = ""
    training: str = ""
    ended: tuple[int, int] = (0, 0)
    waiting: dict[str, Arrival] = field(default_factory=dict)

    @property
    def expected(self) -> frozenset[str]:
        """The sites that the next meeting waits for; none where the training has ended."""
        return frozenset(() if self.ended[0] >= self.majority else (*self.voters, *self.members))

    def add(self, arrival: Arrival) -> None:
        """Have a site wait."""
        if len(self.waiting) >= SITES:
            raise BadRecord(f"{SITES} sites wait already")
        self.waiting[arrival.id] = arrival

    def end(self, meeting: int, number: int) -> None:
        """Note that the training has ended after a meeting, at round `number`. A minority ends nothing but its own part."""
        if 0 < meeting == self.majority:
            self.ended = max(self.ended, (self.number, number))
        elif meeting == self.number:
            self.members = ()

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
        if self.waiting and self._due(now):
            answers |= self._close(now)
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
        """Return True for a site that has waited too long for the sites of a training that it is not in."""
        return arrival.id not in self.expected and now - arrival.since >= arrival.start

    def _enough(self, arrival: Arrival) -> bool:
        return bool(self._came()) or len(self.waiting) >= arrival.sites

    def _due(self, now: float) -> bool:
        """Return True if sites wait no longer: all have come, or their patience has ended."""
        if not self.expected:
            return any(self._enough(each) for each in self.waiting.values())
        if self.expected <= self._came():
            return True
        for group in (self.voters, self.members):  # the same but after meetings of a minority
            if self._prevails(group):
                return self._patience_ends(group, now)
        came = [self.waiting[site] for site in self._came()]
        gone = [each for each in self.waiting.values() if self._enough(each) or self._survives(each)]
        return any(now - each.since >= PHASES * each.phase for each in came or gone)

    def _prevails(self, group: Sequence[str]) -> bool:
        """Return True if more than half of a group is here, or exactly half with the site that came first."""
        here = [site for site in group if site in self.waiting]
        return self._most_of(group) or (0 < 2 * len(here) == len(group) and group[0] in here)

    def _most_of(self, group: Sequence[str]) -> bool:
        return 2 * sum(site in self.waiting for site in group) > len(group)

    def _patience_ends(self, group: Sequence[str], now: float) -> bool:
        """Return True if the sites of a group that prevails wait no longer for others."""
        here = self._here(group)
        if 2 * len(here) == len(group):
            return any(now - each.since >= each.phase for each in here)
        whole = len(here) == len(group) and group is not self.voters
        return whole or now >= self._grace_ends(group)

    def _here(self, group: Sequence[str]) -> list[Arrival]:
        return sorted((each for site, each in self.waiting.items() if site in group), key=lambda each: each.since)

    def _grace_ends(self, group: Sequence[str]) -> float:
        """Return when the sites of a group, more than half of which are here, wait no longer for the others."""
        here = self._here(group)
        return here[len(group) // 2].since + min(each.grace for each in here)  # with that one they were more than half

    def _survives(self, arrival: Arrival) -> bool:
        """Return True for one of more sites that have the model than the training waits for.

        Fewer may be late themselves, while the others are on their way between two meetings.
        """
        known = [each.id for each in self.waiting.values() if each.met > 0 and each.claim.training == self.training]
        return bool(self.training) and arrival.id in known and len(known) > len(self.expected)

    def _close(self, now: float) -> dict[str, Answer]:
        """Close the meeting, and return its record for each site, or the reason why a site is not in it."""
        here, came = dict(self.waiting), self._came()
        prevails = not came or self._prevails(self.voters)
        voting = came & {*self.voters} if prevails else came
        incumbents = {site for site in voting if here[site].met}  # those that have not begun another training
        setup = self.setup if incumbents else next(iter(here.values())).setup
        answers = {site: _error("setup", setup) for site, each in here.items() if each.setup != setup}
        alike = {site: each for site, each in here.items() if site not in answers}
        claims = {site: each.claim for site, each in alike.items()}
        verdict = judge(claims, incumbents, self.training if incumbents else "", self.apart)
        answers |= {site: _error("refused", reason) for site, reason in verdict.refused.items()}
        members = sorted((site for site in alike if site not in answers), key=self._seniority)
        if not members:
            return answers
        self.number, self.members, self.setup = self.number + 1, tuple(members), setup
        self._count_votes(now, prevails=prevails, limit=PHASES * here[members[0]].phase)
        self.training, self.token = verdict.training or f"{secrets.randbits(62):016x}", secrets.token_hex(16)
        record = {
            "kind": "record",
            "number": self.number,
            "training": self.training,
            "round": verdict.round,
            "token": self.token,
            "relay": self.relay,
            "sites": [here[site].seen for site in members],
            "refused": [here[site].name for site in verdict.refused],
        }
        return answers | dict.fromkeys(members, record)

    def _count_votes(self, now: float, *, prevails: bool, limit: float) -> None:
        """Note whether the members of a new meeting are the voters from now on."""
        if prevails or (self.apart_since is not None and now - self.apart_since >= limit):
            self.voters, self.majority = self.members, self.number
            self.apart, self.apart_since = self.apart - {*self.members}, None
        else:
            self.apart |= {*self.members}
            self.apart_since = now if self.apart_since is None else self.apart_since

    def _seniority(self, site: str) -> int:
        known = (*self.voters, *self.members)
        return known.index(site) if site in known else len(known)

    def deadlines(self, arrival: Arrival) -> Iterator[float]:
        """Return the times at which the wait of a site, or with it that of others, may end."""
        waits = (arrival.grace, arrival.phase, PHASES * arrival.phase, arrival.start)
        yield from (arrival.since + seconds for seconds in waits)
        yield from (self._grace_ends(group) for group in (self.voters, self.members) if self._most_of(group))


def _error(error: str, message: str, number: int = 0) -> Answer:
    return {"kind": "error", "error": error, "message": message, "round": number}
