"""The share of sites' work that ends in the model while sites are killed, paused or slow: `python goodput_sites.py`.

Meetings are gradwire's own, by the code of `gradwire rendezvous`. Time and training are simulated, in one process: a site
trains, asks for a meeting, and a round takes as long as given. Work is counted per step and fragment.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from driver import parser_of, write_results

from gradwire.hooks.internet.late_sites import NEW, Claim
from gradwire.hooks.internet.server_meetings import Arrival, Gathering

HOUR = 3600.0


@dataclass(frozen=True)
class Case:
    """Sites and what befalls each of them. Times are in seconds; 0 between kills or pauses: there are none."""

    sites: int = 8
    every: int = 64
    fragments: int = 4
    step: float = 1.0
    round: float = 8.0  # of a fragment
    limit: float = 180.0
    grace: float = 5.0
    hours: float = 8.0
    between_kills: float = 0.0  # the mean, of one site
    repair: float = 120.0  # until a killed site is back, with the model
    between_pauses: float = 0.0
    pause: float = 30.0
    slow: tuple[float, ...] = ()  # factors of the first sites' steps
    by_seconds: bool = False  # every_seconds in place of every


@dataclass
class Site:
    """A site. `due`: steps since the last average of each fragment; `flight`: (fragment, steps) whose average is awaited."""

    name: str
    factor: float
    id: str = ""
    round: int = NEW
    met: int = 0
    life: int = 0  # a change makes events of an earlier life void
    frozen_until: float = 0.0
    due: list[float] = field(default_factory=list)
    flight: tuple[int, float] | None = None
    asked: float | None = None
    waits_since: float | None = None  # its next turn has come, and the round before has not ended


class World:
    """A clock, sites, and the meetings of their training."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.draw, self.now = case, random.Random(seed), 0.0
        self.gathering, self.events = Gathering(), list[tuple[float, int, Callable[[], None]]]()
        self.count, self.meeting = itertools.count(), set[str]()
        self.good = self.waited = 0.0
        self.rounds = self.again = 0
        factors = [*case.slow, *[1.0] * (case.sites - len(case.slow))]
        self.sites = [Site(f"site {place}", factor) for place, factor in enumerate(factors)]
        self.longest = 0.0  # that sites waited for others once most had come
        for site in self.sites:
            self.start(site)
            self.schedule(site, case.between_kills, self.kill)
            self.schedule(site, case.between_pauses, self.pause)

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.count), action))

    def schedule(self, site: Site, mean: float, action: Callable[[Site], None]) -> None:
        """Have Poisson's accidents befall a site."""
        if mean:
            self.at(
                self.now + self.draw.expovariate(1 / mean), lambda: (action(site), self.schedule(site, mean, action))[0]
            )

    def run(self) -> dict[str, float]:
        end = self.case.hours * HOUR
        while self.events[0][0] <= end:
            self.now, _, action = heapq.heappop(self.events)
            action()
        work = sum(end / (self.case.step * site.factor) for site in self.sites)
        return {
            "goodput": self.good / work,
            "rounds": self.rounds,
            "rounds_again": self.again,
            "longest_wait": self.longest,
            "waited": self.waited / (end * self.case.sites),
        }

    # a site

    def start(self, site: Site) -> None:
        site.life, site.round, site.met, site.flight, site.waits_since = site.life + 1, NEW, 0, None, None
        site.id, site.due = f"{site.name}, life {site.life}", [0.0] * self.case.fragments
        self.ask(site)

    def alive(self, site: Site, life: int) -> bool:
        return site.life == life and bool(site.id)

    def train(self, site: Site) -> None:
        """Train until the next turn."""
        turn = self.case.every // self.case.fragments * self.case.step
        seconds = turn if self.case.by_seconds else turn * site.factor
        life = site.life
        self.at(self.now + seconds, lambda: self.turn(site, life, seconds / (self.case.step * site.factor)))

    def turn(self, site: Site, life: int, steps: float) -> None:
        if not self.alive(site, life):
            return
        if self.now < site.frozen_until:
            return self.at(site.frozen_until, lambda: self.turn(site, life, steps))
        site.due = [each + steps for each in site.due]
        site.waits_since = self.now
        if site.asked is None:
            self.next_round(site)

    def next_round(self, site: Site) -> None:
        """Begin a round with what was trained, and train on."""
        assert site.waits_since is not None
        self.waited += self.now - site.waits_since
        site.waits_since = None
        fragment = max(site.round, 0) % self.case.fragments
        site.flight, site.due[fragment] = (fragment, site.due[fragment]), 0.0
        self.ask(site)
        self.train(site)

    def kill(self, site: Site) -> None:
        if not site.id:
            return
        gone, site.id, site.asked = site.id, "", None
        site.life += 1
        self.gathering.waiting.pop(gone, None)
        self.at(self.now + self.case.repair, lambda: self.start(site))
        if gone in self.meeting:
            self.break_up()
        self.review()

    def pause(self, site: Site) -> None:
        site.frozen_until = max(site.frozen_until, self.now + self.case.pause)

    # meetings

    def ask(self, site: Site) -> None:
        life = site.life
        if self.now < site.frozen_until:
            site.asked = site.frozen_until
            return self.at(site.frozen_until, lambda: self.ask(site) if self.alive(site, life) else None)
        case, claim = self.case, Claim(self.gathering.training if site.round > 0 else "", site.round)
        site.asked, phase = self.now, case.limit / 3
        arrival = Arrival(
            site.id, site.name, "", "", 1, "alike", site.met, case.sites, phase, case.grace, 1800.0, claim, self.now
        )
        self.gathering.add(arrival)
        for time in self.gathering.deadlines(arrival):
            self.at(time + 1e-6, lambda: self.review() if self.gathering.waiting.get(arrival.id) is arrival else None)
        self.review()

    def review(self) -> None:
        """Close the meeting where it is due, and begin its round."""
        came = sorted(
            self.gathering.waiting[site].since for site in self.gathering.expected & self.gathering.waiting.keys()
        )
        most = came[len(self.gathering.expected) // 2] if len(came) > len(self.gathering.expected) // 2 else self.now
        answers = self.gathering.review(self.now)
        records = {site: answer for site, answer in answers.items() if answer["kind"] == "record"}
        if not records:
            return
        self.longest = max(self.longest, self.now - most)
        number = next(iter(records.values()))["round"]
        here = [site for site in self.sites if site.id in records]
        self.meeting = {site.id for site in here}
        for site in here:
            site.met = self.gathering.number
        self.end_at(self.now + self.case.round, number, self.gathering.number)

    def end_at(self, time: float, number: int, meeting: int) -> None:
        self.at(time, lambda: self.finish(number, meeting, time))

    def finish(self, number: int, meeting: int, due: float) -> None:
        """End a round; a paused site holds it up, until the limit of an exchange breaks it up."""
        here = [site for site in self.sites if site.id in self.meeting]
        if not self.meeting or meeting != self.gathering.number:
            return
        resumes = max(site.frozen_until for site in here)
        if resumes > self.now:
            limit = due - self.case.round + self.case.limit / 3
            if self.now >= limit:
                return self.break_up([site for site in here if site.frozen_until > self.now])
            return self.at(min(resumes, limit), lambda: self.finish(number, meeting, due))
        self.rounds += number != NEW
        self.meeting = set()
        for site in here:
            self.end_round(site, number)

    def end_round(self, site: Site, number: int) -> None:
        if site.round == number and site.flight is not None:
            self.good += site.flight[1] / self.case.fragments
        elif number != NEW:
            site.due = [0.0] * self.case.fragments  # it took the others' model
        began = site.flight is None
        site.flight, site.asked = None, None
        site.round = max(number, 0) + (number != NEW)
        if began:
            self.train(site)
        elif site.waits_since is not None:
            self.next_round(site)

    def break_up(self, slow: list[Site] | None = None) -> None:
        """Have the sites of a round that failed meet again."""
        here, self.meeting = [site for site in self.sites if site.id in self.meeting], set()
        self.again += 1
        for site in here:
            self.ask(site)


CASES = {
    "nothing happens": Case(),
    "killed once in 24 h": Case(between_kills=24 * HOUR),
    "killed once in 4 h": Case(between_kills=4 * HOUR),
    "killed once in 1 h": Case(between_kills=HOUR),
    "killed once in 30 min": Case(between_kills=HOUR / 2),
    "killed once in 20 min": Case(between_kills=HOUR / 3),
    "paused for 30 s once in 1 h": Case(between_pauses=HOUR),
    "killed once in 4 h, paused once in 1 h": Case(between_kills=4 * HOUR, between_pauses=HOUR),
    "one site is half as fast, every": Case(slow=(2.0,)),
    "one site is half as fast, every_seconds": Case(slow=(2.0,), by_seconds=True),
    "all of this, every_seconds": Case(between_kills=4 * HOUR, between_pauses=HOUR, slow=(2.0,), by_seconds=True),
}


def main() -> None:
    """Print a row for each case, and write all to a file."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = {}
    print("| | goodput | rounds | done again | longest wait once most had come |\n|---|---|---|---|---|")
    for name, case in CASES.items():
        found = [World(case, seed).run() for seed in arguments.seeds]
        rows[name] = {key: sum(each[key] for each in found) / len(found) for key in found[0]}
        rows[name]["longest_wait"] = max(each["longest_wait"] for each in found)
        row = rows[name]
        print(
            f"| {name} | {100 * row['goodput']:.1f} % | {row['rounds']:.0f} | {row['rounds_again']:.0f} | "
            f"{row['longest_wait']:.1f} s |"
        )
    write_results(arguments.json, rows)


if __name__ == "__main__":
    main()
