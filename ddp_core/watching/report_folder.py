"""A small file of each rank's last report, in a folder that rank 0 writes.

Reports come to rank 0 by the store in which the ranks have met, over any number of hosts: no collective, which training
would wait for, and no folder that all hosts share. A thread does so, since a store may be slow to answer.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from ..transport.torch_groups import store_of
from .report import Report

logger = logging.getLogger(__name__)
FILE = re.compile(r"rank-\d+\.json")
PAUSE = 2.0  # seconds between two looks of rank 0 for reports of others
AT_END = 5.0  # seconds that the thread has to come to its end


class FolderOfRanks:
    """Takes this rank's reports, and brings them to rank 0, which writes them."""

    def __init__(self, folder: str | Path, group: dist.ProcessGroup, every: int) -> None:
        self._place = {"rank": group.rank(), "ranks": group.size(), "host": socket.gethostname(), "every": every}
        store = store_of(group)
        if type(store) is dist.Store:  # MPI's placeholder
            raise RuntimeError("watch(folder=...) needs a store in which ranks meet, and an MPI group has none")
        self._reports: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        courier = Courier(
            self._reports, dist.PrefixStore(f"gradwire/watch/{folder}/", store), group.rank(), group.size()
        )
        if group.rank() == 0:
            try:
                courier.folder = writable(Path(folder).expanduser())
            except OSError as error:  # a rank that raised alone would leave the others waiting
                logger.error(
                    "training continues without reports for `gradwire top`: rank 0 cannot write to %s: %s. Give "
                    "watch(folder=) a folder that rank 0 can write to",
                    folder,
                    error,
                )
        thread = threading.Thread(target=courier.run, name="gradwire-watch", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, self._reports, thread)  # a thread inside torch would abort the exit

    def __call__(self, report: Report) -> None:
        measured = {"step": report.step, "compressor": report.compressor, "metrics": report.metrics}
        self._reports.put(json.dumps({**self._place, **measured}))


def _end(reports: queue.SimpleQueue[str | None], thread: threading.Thread) -> None:
    """Write what has come, and end."""
    reports.put(None)
    thread.join(AT_END)


class Courier:
    """The thread's work. `folder`: where rank 0 writes."""

    def __init__(self, reports: queue.SimpleQueue[str | None], store: dist.Store, rank: int, ranks: int) -> None:
        self.folder: Path | None = None
        self._reports, self._store, self._rank = reports, store, rank
        if rank:
            store.set(str(rank), "")  # in place of its report of an earlier watch
        self._awaited, self._known = list(range(1, ranks)), list[int]()
        self._written: dict[int, str] = {}

    def run(self) -> None:
        """Until None comes, or the store is gone."""
        try:
            while self._carry():
                pass
        except (RuntimeError, OSError) as error:
            logger.warning("reports reach the folder of rank 0 no more: %s", error)

    def _carry(self) -> bool:
        """Bring the next report, if one comes in time, and on rank 0 collect those of others; whether to go on."""
        try:
            report = self._reports.get(timeout=None if self.folder is None else PAUSE)
        except queue.Empty:
            report = ""
        if report and self.folder is None:
            self._store.set(str(self._rank), report)
        elif report:
            self._write(self._rank, report)
        if self.folder is not None:
            self._collect()
        return report is not None

    def _collect(self) -> None:
        """Write what is new of other ranks. Asks only for what is there: `get` would wait."""
        arrived = [rank for rank in self._awaited if self._store.check([str(rank)])]
        self._known += arrived
        self._awaited = [rank for rank in self._awaited if rank not in arrived]
        for rank in self._known:
            self._write(rank, self._store.get(str(rank)).decode())

    def _write(self, rank: int, report: str) -> None:
        """Write all of a file at once, so that a reader sees the old one or the new one."""
        if self.folder is None or not report or self._written.get(rank) == report:
            return
        self._written[rank] = report
        path, fresh = self.folder / f"rank-{rank:05}.json", self.folder / f".rank-{rank:05}.json"
        fresh.write_text(report, encoding="utf-8")
        os.replace(fresh, path)


def writable(folder: Path) -> Path:
    """Make the folder where there is none, and take away what an earlier training left. OSError where that is impossible."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in files_in(folder):
        path.unlink()
    trial = folder / ".trial"
    trial.write_text("", encoding="utf-8")
    trial.unlink()
    return folder


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the ranks' files, by rank."""
    return (path for path in sorted(folder.iterdir()) if FILE.fullmatch(path.name))
