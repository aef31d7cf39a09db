"""The use of each link: bytes counted in a thread, kept, drawn (as in figures 8 and 9 of Jayarajan et al. 2019)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from ...results.optional import optional_files
from ...results.palette import DPI
from ..link import BITS_PER_BYTE, parse_rate
from .beside import beside
from .config import NetlabConfig
from .hosts import INTERFACES, Lab

INTERVAL = 0.01  # seconds between two counts
SHORT = 0.0005  # seconds that reading all counters may take for them to be of one moment
TRIES = 5
# A port receives the bytes that its host has sent.
COUNTERS = {"sent_bytes": "rx_bytes", "received_bytes": "tx_bytes"}
DIRECTIONS = {"sent_bytes": "up, Mbit/s", "received_bytes": "down, Mbit/s"}
BITS_PER_MBIT = 10**6
VISIBLE = 0.01  # of the highest rate


@dataclass(frozen=True)
class Utilization:
    """Bytes over the links of a lab, as counted since its start.

    `seconds`: when each count was taken, since the first. `links`: by host, `sent_bytes` and `received_bytes`, one total
    for each of these times, Ethernet headers included. `began`: the first count, in seconds since 1970. `down`: the rate
    towards a host, if it is not `rate`.
    """

    network: str
    rate: str
    began: float
    seconds: list[float] = field(default_factory=list)
    links: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    down: str | None = None

    def write(self, path: Path) -> None:
        """Write JSON."""
        document = {"kind": "utilization", "interval_seconds": INTERVAL, **vars(self)}
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Utilization:
        """Read what `write` wrote. Raises ValueError for another file."""
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("kind", None) != "utilization":
            raise ValueError(f"{path} is no file of --utilization")
        del document["interval_seconds"]
        return cls(**document)

    def rates(self, host: int, name: str) -> list[float]:
        """Mbit/s between each two counts."""
        counts, seconds = self.links[str(host)][name], self.seconds
        return [
            (counts[i] - counts[i - 1]) * BITS_PER_BYTE / BITS_PER_MBIT / (seconds[i] - seconds[i - 1])
            for i in range(1, len(seconds))
        ]

    def busy(self, host: int) -> tuple[float, float]:
        """From the first traffic that can be seen in a picture to the last; everything where nothing was sent."""
        seen, seconds = self.rates(host, "sent_bytes"), self.seconds
        visible = [i for i, rate in enumerate(seen) if rate > VISIBLE * max(seen)]
        return (seconds[visible[0]], seconds[visible[-1] + 1]) if visible else (0.0, max(seconds[-1], INTERVAL))


@contextmanager
def recorded(config: NetlabConfig, lab: Lab) -> Iterator[None]:
    """Count in a thread while the block lasts; then write the file that is asked for, and a picture beside it."""
    if not config.utilization:
        yield
        return
    utilization = Utilization(config.described, config.rate, time.time(), down=config.down)
    try:
        with beside(partial(_count, utilization, lab), "gradwire-utilization"):
            yield
    finally:
        write_and_draw(utilization, Path(config.utilization).expanduser())


def write_and_draw(utilization: Utilization, path: Path) -> None:
    """Write the counts and, where matplotlib is installed, the picture; say where they are."""
    utilization.write(path)
    print(f"utilization  {path}")
    _, where = optional_files(partial(draw, utilization, path.with_suffix(".png")))
    print(f"picture      {where}")


def draw(utilization: Utilization, path: Path) -> list[Path]:
    """Draw what host 0 sent and received while there was traffic, in Mbit/s over seconds; where that is."""
    from matplotlib.figure import Figure  # here, since it is optional

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    limits = (utilization.rate, utilization.rate if utilization.down is None else utilization.down)
    for axes, (name, label), rate in zip(figure.subplots(2, 1, sharex=True), DIRECTIONS.items(), limits, strict=True):
        axes.fill_between(utilization.seconds[1:], utilization.rates(0, name), step="pre", linewidth=0)
        if limit := parse_rate(rate):
            axes.axhline(limit * BITS_PER_BYTE / BITS_PER_MBIT, color="gray", linestyle="--", linewidth=0.8)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    axes.set_xlabel("seconds")
    axes.set_xlim(utilization.busy(0))
    figure.suptitle(f"link of host 0, {utilization.network}", fontsize=11)
    figure.savefig(path, dpi=DPI)
    return [path]


def _count(utilization: Utilization, lab: Lab, stop: Event) -> None:
    began = due = time.perf_counter()
    with ExitStack() as files:
        descriptors, counts = [], []
        for host in range(lab.hosts):
            for name, counter in COUNTERS.items():
                file = files.enter_context((INTERFACES / lab.port(host) / "statistics" / counter).open())
                descriptors.append(file.fileno())
                counts.append(utilization.links.setdefault(str(host), {}).setdefault(name, []))
        while not stop.is_set():
            taken_at, totals = _look(descriptors)
            utilization.seconds.append(round(taken_at - began, 6))
            for column, total in zip(counts, totals, strict=True):
                column.append(total)
            due = max(due + INTERVAL, taken_at + INTERVAL / 2)  # after a delay, no interval is too short to tell a rate
            time.sleep(max(0.0, due - time.perf_counter()))


def _look(descriptors: Sequence[int]) -> tuple[float, list[int]]:
    """All counters and the time (time.perf_counter); anew where the thread was held up between the two."""
    for _ in range(TRIES):
        began = time.perf_counter()
        totals = [int(os.pread(descriptor, 32, 0)) for descriptor in descriptors]
        ended = time.perf_counter()
        if ended - began < SHORT:
            break
    return (began + ended) / 2, totals
