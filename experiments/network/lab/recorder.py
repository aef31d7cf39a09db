"""The bytes over each link, counted in a thread while a lab runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ...results.optional import optional_files
from .config import NetlabConfig
from .hosts import INTERFACES, Lab
from .utilization import INTERVAL, Utilization

SHORT = 0.0005  # seconds that reading all counters may take for them to be of one moment
TRIES = 5
# What the bridge receives on a port is what that host has sent.
COUNTERS = {"sent_bytes": "rx_bytes", "received_bytes": "tx_bytes"}


@contextmanager
def recorded(config: NetlabConfig, lab: Lab) -> Iterator[None]:
    """Count in a thread while the block lasts; then write the file that is asked for, and a picture beside it."""
    if not config.utilization:
        yield
        return
    utilization, stop = Utilization(config.described, config.rate, time.time()), threading.Event()
    thread = threading.Thread(target=_count, args=(utilization, lab, stop), name="gradwire-utilization")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        write_and_draw(utilization, Path(config.utilization).expanduser())


def write_and_draw(utilization: Utilization, path: Path) -> None:
    """Write the counts and, where matplotlib is installed, the picture; say where they are."""
    utilization.write(path)
    print(f"utilization  {path}")
    _, where = optional_files(partial(_drawn, utilization, path.with_suffix(".png")))
    print(f"picture      {where}")


def _drawn(utilization: Utilization, path: Path) -> Sequence[Path]:
    from .picture import draw  # here, since matplotlib is optional

    return [draw(utilization, path)]


def _count(utilization: Utilization, lab: Lab, stop: threading.Event) -> None:
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
