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
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ...ddp_core import register_backend
from ..network.lab import backend_here, rerun_on_hosts
from ..ranks.device import chosen_backend, device_here
from ..ranks.group import joined
from ..ranks.launchers import adopt_launcher
from ..ranks.processes import supervised
from ..ranks.stopping import sigterm_interrupts
from ..results.files import write_figures
from ..results.optional import optional_files
from ..results.progress_bar import progress_bar
from .config import CollectiveConfig
from .measure import Row, rows_of


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
    torch.set_num_threads(config.threads)
    device, bar = device_here(backend, rank), progress_bar(Console(quiet=rank > 0))
    if "gradwire" in (backend, *config.against):
        register_backend()
    with joined(backend, timedelta(seconds=config.timeout), rendezvous) as group, bar:
        others = [other for other in dict.fromkeys(config.against) if other != backend]
        groups = {backend: group} | {other: dist.new_group(backend=other) for other in others}
        for row in rows_of(config, groups, device, bar):
            if rank == 0:
                keep(row)


def _show_and_write(config: CollectiveConfig, rows: Sequence[Row]) -> None:
    """Show and write what was measured, if anything."""
    if not rows:
        return
    Console().print(_table(rows))
    if config.json:
        write_figures("collective", config, rows, config.json)
        picture = Path(config.json).expanduser().with_suffix(".png")
        _, where = optional_files(partial(_drawn, rows, picture))
        print(f"picture      {where}")


def _drawn(rows: Sequence[Row], path: Path) -> Sequence[Path]:
    from .picture import draw  # here, since matplotlib is optional

    return [draw(rows, path)]


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    several = {name: len({row[name] for row in rows}) > 1 for name in ("operation", "backend", "total_elements")}
    title = [
        " and ".join(dict.fromkeys(row["operation"].replace("_", "-") for row in rows))
        + ("" if several["total_elements"] else f" of {first['total_elements']:,} float32"),
        f"{first['world_size']} ranks",
        " and ".join(dict.fromkeys(row["backend"] for row in rows)),
    ]
    table = Table(title=", ".join([*title, *first["labels"]]), title_justify="left")
    named = [name for name in ("operation", "backend") if several[name]]
    share = ["link"] * any(row["link_share"] for row in rows)
    for heading in [*named, "elements", "pieces", "p50", "p95", "MB/s", "bus MB/s", *share, "processor"]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(row[name].replace("_", "-") for name in named), *_cells(row))
    return table


def _cells(row: Row) -> Sequence[str]:
    times = [f"{row['seconds'][name]:.3f} s" for name in ("p50", "p95")]
    rates = [f"{row[name] / 1e6:.0f}" for name in ("bytes_per_second", "bus_bytes_per_second")]
    share = [f"{row['link_share']:.1%}"] if row["link_share"] else []
    return [
        f"{row['elements']:,}",
        f"{row['pieces']:,}",
        *times,
        *rates,
        *share,
        f"{row['processor_seconds']['p50']:.3f} s",
    ]
