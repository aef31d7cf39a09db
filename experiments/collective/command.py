"""`gradwire collective`: how long collectives take, by the size of the pieces (figure 2 of Li et al. 2020)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ...ddp_core import adopt_launcher
from ...ddp_core.transport.direct.torch_backend import register
from ..network.lab import backend_here, rerun_on_hosts
from ..ranks.device import chosen_backend, device_here
from ..ranks.group import further_group, joined
from ..ranks.launchers import threads_here
from ..ranks.processes import supervised
from ..ranks.stopping import sigterm_interrupts
from ..results.files import figures_document, write_json
from ..results.progress_bar import progress_bar
from .measure import CollectiveConfig, Row, rows_of


def collective(config: CollectiveConfig) -> int:
    """Measure, show and write, where it ends early what was measured until then; the command's exit code."""
    if (code := rerun_on_hosts(config.netlab)) is not None:
        return code
    launcher = adopt_launcher()
    backend = chosen_backend(backend_here(config.backend), int(os.environ.get("LOCAL_WORLD_SIZE", config.nproc)))
    if launcher:
        _inside_launcher(config, backend)
        return 0
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        file = Path(folder) / "rows"
        file.touch()
        code = supervised(_rank, config.nproc, config, backend, partial(_append, file))
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    _show_and_write(config, rows)
    return code


def _append(file: Path, row: Row) -> None:
    """Keep a row where the process that started this one finds it, however this one ends."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def _inside_launcher(config: CollectiveConfig, backend: str) -> None:
    """This process is a rank already."""
    rows: list[Row] = []
    try:
        with sigterm_interrupts():
            _rank(int(os.environ["RANK"]), None, config, backend, rows.append)
    finally:
        _show_and_write(config, rows)


def _rank(
    rank: int,
    rendezvous: dict[str, Any] | None,
    config: CollectiveConfig,
    backend: str,
    keep: Callable[[Row], None],
) -> None:
    """All sizes on this rank; rank 0 keeps each row as soon as it is there."""
    torch.set_num_threads(threads_here(config.threads, config.nproc))
    device, bar = device_here(backend, rank), progress_bar(Console(quiet=rank > 0))
    if "gradwire" in (backend, *config.against):
        register()
    with joined(backend, timedelta(seconds=config.timeout), rendezvous) as group, bar:
        groups = {backend: group} | {other: further_group(other) for other in config.against if other != backend}
        for row in rows_of(config, groups, device, bar):
            if rank == 0:
                keep(row)


def _show_and_write(config: CollectiveConfig, rows: Sequence[Row]) -> None:
    """Show and write what was measured, if anything."""
    if not rows:
        return
    Console().print(_table(rows))
    if config.json:
        write_json(figures_document("collective", config, rows), config.json)


def _table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table. Values of all rows are in the title; a comparison leaves out `LEAST_TELLING`."""
    first = rows[0]
    same = {name: len({row[name] for row in rows}) == 1 for name in ("operation", "backend", "total_elements")}
    compared = not (same["operation"] and same["backend"])
    operations = " and ".join(dict.fromkeys(row["operation"].replace("_", "-") for row in rows))
    size = f" of {first['total_elements']:,} float32" if same["total_elements"] else ""
    backends = " and ".join(dict.fromkeys(row["backend"] for row in rows))
    title = ", ".join([f"{operations}{size}", f"{first['world_size']} ranks", backends, *first["labels"]])
    table = Table(title=title, title_justify="left")
    columns = [name for name in COLUMNS if not (same.get(name) or (compared and name in LEAST_TELLING))]
    if not first["link_share"]:
        columns.remove("link")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(COLUMNS[name](row) for name in columns))
    return table


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= SHORT else f"{seconds * 1e3:.2f} ms"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "operation": lambda row: row["operation"].replace("_", "-"),
    "backend": lambda row: row["backend"],
    "elements": lambda row: f"{row['elements']:,}",
    "pieces": lambda row: f"{row['pieces']:,}",
    "p50": lambda row: _time(row["seconds"]["p50"]),
    "p95": lambda row: _time(row["seconds"]["p95"]),
    "MB/s": lambda row: f"{row['bytes_per_second'] / 1e6:.0f}",
    "bus MB/s": lambda row: f"{row['bus_bytes_per_second'] / 1e6:.0f}",
    "link": lambda row: f"{row['link_share']:.1%}",
    "processors": lambda row: _time(row["processor_seconds"]["p50"]),
}
LEAST_TELLING = ("pieces", "p95", "MB/s")
SHORT = 0.1  # seconds
