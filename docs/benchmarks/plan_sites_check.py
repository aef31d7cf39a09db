"""`gradwire plan --sites` against sites behind emulated lines: seconds of a round, and share of the time computing.

    python plan_sites_check.py --json plan-sites-check.json

Sites, a relay and lines of `tests/wan.py` run in one process on a simulated clock, which jumps to the
next event. Connections, proofs, frames and the relay are gradwire's own, over sockets. The bytes of a round are those that a
compressor asks for. Arithmetic takes no time. The last case has the steps between averages, fragments and compressor that
the plan names.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from driver import parser_of, write_results
from rich.console import Console
from rich.table import Table

from gradwire import compressor
from gradwire.compress import Ranks
from gradwire.compress.protocol.requests import AllGather, AllReduce
from gradwire.compress.simulate import STEADY, requests_of
from gradwire.ddp_core import layout_of
from gradwire.experiments.sites_lines import FOR_SITES
from gradwire.experiments.sites_plan import Wan, computing_share, recommended, round_plan, sites_plan
from gradwire.hooks.internet.link import Listener, dial
from gradwire.hooks.internet.records import read, written
from gradwire.hooks.internet.relay import Star, joined
from gradwire.hooks.internet.secret import Secret
from gradwire.hooks.internet.server import Server
from gradwire.hooks.local_sgd.fragment import grouped

sys.path.insert(0, str(Path(__file__).parents[2]))  # the clone, whose tests have the emulated lines
from tests.wan import Direction
from tests.wan import Wan as Line

HERE, SIDE, MBIT = "127.0.0.1", 256, 1e6 / 8
REPORT = bytes(56)  # what a site tells the others before a round
PATIENCE = 3600.0  # seconds of the simulated clock
LOOK = 0.001  # real seconds in which a socket may become readable before the clock jumps


@dataclass(frozen=True)
class Case:
    """`up`, `down`: Mbit/s; `trip`: seconds to the relay and back; `step`: seconds that a step computes; `wanted`: share."""

    compressor: str
    parameters: int = 1 << 20
    up: float = 1.0
    down: float = 4.0
    trip: float = 0.06
    fragments: int = 1
    every: int = 8
    step: float = 0.5
    sites: int = 4
    wanted: float = 0.0
    cycles: int = 4

    @property
    def wan(self) -> Wan:
        """The network of a site."""
        return Wan(self.sites, self.up * MBIT, self.down * MBIT, self.trip, relay=True)

    @property
    def matrices(self) -> dict[str, torch.Tensor]:
        """The model."""
        return {str(place): torch.empty(SIDE, SIDE, device="meta") for place in range(self.parameters // SIDE**2)}

    @property
    def parts(self) -> list[dict[str, torch.Tensor]]:
        """The parameters of each fragment."""
        return list(grouped(self.matrices, self.fragments).values())


CASES = [
    Case("none", 1 << 18, up=2.0, down=8.0),
    Case("bf16", 1 << 19, up=2.0, down=8.0, fragments=2),
    Case("int8", up=2.0, down=8.0, trip=0.1, fragments=2),
    Case("int4"),
    Case("int4", down=1.0, fragments=2),
    Case("int4", sites=2, up=0.5, down=2.0, fragments=2, every=16),
    Case("int4", 1 << 19, sites=8, up=0.5, every=16),
    Case("int2", up=0.5, down=2.0, trip=0.2),
    Case("topk:ratio=0.01", up=0.5, down=2.0),
    Case("powersgd:rank=4", up=0.25, down=1.0, every=4),
    Case("onebit", up=0.5, down=0.5, fragments=2),
    Case("int4", up=10.0, down=10.0, trip=0.2, every=16, step=0.1),
    Case("int4", up=4.0, down=16.0, every=32, step=0.25, fragments=4),
    Case("", up=110.0, down=500.0, step=0.1, wanted=0.94),
]


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time jumps to the next event once no socket has anything to read."""

    def __init__(self) -> None:
        super().__init__()
        self._now, self._really = 0.0, self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._waiting  # type: ignore[attr-defined]

    def time(self) -> float:
        """The simulated time, in seconds."""
        return self._now

    def _waiting(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return self._really(None)
        events = self._really(0 if timeout <= 0 else LOOK)
        if not events and timeout > 0:
            self._now += timeout
        return events


@dataclass
class Site:
    """A site: what it asks for in each fragment's round, and the moments and seconds that are measured."""

    place: int
    case: Case
    port: int
    requests: list[list[Any]]
    star: Star | None = None
    record: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    turns: list[float] = field(default_factory=list)
    rounds: list[tuple[int, float]] = field(default_factory=list)

    async def train(self) -> None:
        """Compute, and have a round at each turn beside the steps that follow."""
        await self.round(0)  # the first meeting connects
        self.rounds.clear()
        flight, fragments = None, len(self.requests)
        for turn in range(self.case.cycles * fragments):
            await asyncio.sleep(self.case.every // fragments * self.case.step)
            if flight is not None:
                await flight
            self.turns.append(asyncio.get_running_loop().time())
            flight = asyncio.ensure_future(self.round(turn % fragments))
        assert flight is not None
        await flight

    async def round(self, fragment: int) -> None:
        """Meet the others and exchange what a round needs."""
        began = asyncio.get_running_loop().time()
        await self.meet()
        await self.gather(len(REPORT))
        for request in self.requests[fragment]:
            size = request.tensor.nbytes
            if isinstance(request, AllGather):
                await self.gather(size)
                continue
            await self.exchange([bytes(size // self.case.sites) for _ in range(self.case.sites)])
            if isinstance(request, AllReduce):
                await self.gather(size // self.case.sites)
        self.rounds.append((fragment, asyncio.get_running_loop().time() - began))

    async def meet(self) -> None:
        """Ask for the next meeting; at the first one connect with the relay."""
        name = f"site {self.place}"
        who = {"id": name, "name": name, "host": HERE, "port": 0, "setup": "alike", "prefix": "training"}
        stands = {"epoch": self.record.get("epoch", ""), "met": self.number, "training": "", "round": -1}
        limits = {"sites": self.case.sites, "known": 0, "phase": PATIENCE, "grace": PATIENCE, "start": PATIENCE}
        link = await dial(HERE, self.port, Secret(), "the rendezvous", PATIENCE)
        asked = {"ask": "meet", "link": self.record.get("token", ""), **who, **stands, **limits}
        await link.send(written(asked))
        record = read(await link.receive(), "the answer")
        link.close()
        if self.star is None:
            ids = [each["id"] for each in record["sites"]]
            link = await dial(HERE, self.port, Secret(), "the relay", PATIENCE)
            question = {"ask": "relay", "prefix": "training", "token": record["token"], "id": name, "phase": PATIENCE}
            self.star = await joined(link, question, ids, ids.index(name))
        self.record, self.number = record, record["number"]

    async def gather(self, size: int) -> None:
        """Send a payload to all others."""
        await self.exchange([bytes(size)] * self.case.sites)

    async def exchange(self, outgoing: list[bytes]) -> None:
        """Send a payload to each other site, and receive as large ones."""
        assert self.star is not None
        self.record["exchange"] = self.record.get("exchange", 0) + 1
        await self.star.exchange(self.record["exchange"], outgoing, [len(each) for each in outgoing])


async def measured(case: Case) -> dict[str, Any]:
    """Run a case; its row has what is predicted, and the mean over sites of what is measured."""
    port, lines = await relay(), []
    for _ in range(case.sites):
        rates = (Direction(rate * MBIT, case.trip / 2) for rate in (case.up, case.down))
        lines.append(Line(HERE, port, *rates))
    ranks, meta = Ranks(case.sites), torch.device("meta")
    layouts = [layout_of(part, torch.float32, meta, ranks) for part in case.parts]
    asked = [list(requests_of(compressor(case.compressor), layout, STEADY)) for layout in layouts]
    sites = [Site(place, case, await line.open(), asked) for place, line in enumerate(lines)]
    await asyncio.gather(*(each.train() for each in sites))
    rounds = [round_plan(compressor(case.compressor), part, case.wan).seconds for part in case.parts]
    shares = [computing_share(case.every, len(rounds), case.step, each) for each in rounds]
    return asdict(case) | {
        "seconds_planned": statistics.mean(rounds),
        "seconds": statistics.mean(_seconds(each.rounds, len(rounds)) for each in sites),
        "computing_planned": len(shares) / sum(1 / each for each in shares),
        "computing": statistics.mean(_share(each.turns, case, len(rounds)) for each in sites),
    }


async def relay() -> int:
    """Have a rendezvous that relays listen, on this loop; return its port."""
    server = Server.__new__(Server)  # which has a loop and a thread of its own otherwise
    server.host, server._epoch, server._relay = HERE, "here", True
    server._rooms, server._gatherings, server._answers = {}, OrderedDict(), {}
    server._listener = Listener(Secret(), server._serve, PATIENCE)
    return await server._listener.open(HERE, 0)


def completed(case: Case) -> Case:
    """Return the case with what the plan names, where it names no compressor."""
    if case.compressor:
        return case
    plans = [sites_plan(compressor(spec), case.matrices, case.wan, case.step, case.wanted) for spec in FOR_SITES]
    best = recommended(plans)
    return replace(case, compressor=FOR_SITES[best], every=plans[best].every, fragments=len(plans[best].rounds))


def _seconds(rounds: list[tuple[int, float]], fragments: int) -> float:
    """Return the mean over fragments of the median of their rounds."""
    return statistics.mean(
        statistics.median(seconds for fragment, seconds in rounds if fragment == number) for number in range(fragments)
    )


def _share(turns: list[float], case: Case, fragments: int) -> float:
    """Return the share of time computing between whole cycles."""
    return (len(turns) - fragments) * (case.every // fragments) * case.step / (turns[-1] - turns[fragments - 1])


def rows_of(cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Yield the row of each case, which runs on a clock of its own."""
    for case in cases:
        loop = Clock()
        asyncio.set_event_loop(loop)
        yield loop.run_until_complete(measured(completed(case)))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def errors(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Return how far, relative to the measurement, each plan is off."""
    return [abs(row[f"{name}_planned"] / row[name] - 1) for row in rows]


def main() -> None:
    """Run the cases and show them."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="their numbers")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    rows = []
    for row in rows_of([CASES[number] for number in options.cases]):
        rows.append(row)
        counts = (
            row["compressor"],
            row["parameters"],
            row["sites"],
            row["up"],
            row["down"],
            row["every"],
            row["fragments"],
        )
        print(
            *counts,
            *(f"{row[n]:.3f}" for n in ("seconds", "seconds_planned", "computing", "computing_planned")),
            flush=True,
        )
        write_results(options.json, rows)
    headings = ("compressor", "sites", "up, down", "every", "fragments", "round, s", "planned", "computing", "planned")
    table = Table(*headings)
    for row in rows:
        counts = row["compressor"], row["sites"], f"{row['up']:g}, {row['down']:g}", row["every"], row["fragments"]
        seconds, shares = ([row[name], row[f"{name}_planned"]] for name in ("seconds", "computing"))
        table.add_row(*map(str, counts), *(f"{each:.2f}" for each in seconds), *(f"{each:.1%}" for each in shares))
    Console(width=120).print(table)
    for name in ("seconds", "computing"):
        found = errors(rows, name)
        print(f"{name}: median error {statistics.median(found):.1%}, largest {max(found):.1%}")


if __name__ == "__main__":
    main()
