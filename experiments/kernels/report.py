"""The rows for a terminal, and a bar until they are there; without rich, which draws both, a line for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from ..results.rows import milliseconds
from .bench import Row

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("time", "±", "GB/s", "of copy", "torch", "against torch")
GIGA = 1e9


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, str | None], None]]:
    """A bar on the terminal, with the job that is under way; the function moves it by a number of steps."""
    if find_spec("rich") is None:
        yield lambda steps, description: None
        return
    from rich.console import Console

    from ..results.progress_bar import progress_bar

    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda steps, description: bar.update(task, advance=steps, description=description)


def show(rows: Sequence[Row]) -> None:
    """Print the rows."""
    if find_spec("rich") is None:
        print(*lines(rows), sep="\n")
        return
    from rich.console import Console

    console = Console(width=max(Console().width, 120))
    console.print(*tables(rows), sep="\n")


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the contents of the tables, a line for each row."""
    for row in sorted(rows, key=_place):
        told = ", ".join(f"{name} {figure}" for name, figure in zip(HEADINGS, figures(row), strict=True) if figure)
        yield f"{_title(row)}: {row.operation} on {_backend(row)}: {told}"


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One table for each size, dtype and number of threads."""
    from rich.table import Table

    for _, each in groupby(sorted(rows, key=_place), key=_place):
        members = list(each)
        table = Table(title=_title(members[0]), title_justify="left")
        table.add_column("operation", no_wrap=True)
        table.add_column("backend")
        for heading in HEADINGS:
            table.add_column(heading, justify="right", no_wrap=True)
        for operation, alike in groupby(members, key=lambda row: row.operation):
            _add_operation(table, operation, list(alike))
        yield table


def _add_operation(table: Table, operation: str, rows: Sequence[Row]) -> None:
    table.add_section()
    for index, row in enumerate(rows):
        table.add_row(operation if not index else "", _backend(row), *figures(row), style="" if row.correct else "red")


def _place(row: Row) -> tuple[int, str, int]:
    return row.elements, row.dtype, row.threads


def _title(row: Row) -> str:
    return f"{row.elements:,} elements, {row.dtype}, {threaded(row.threads)}"


def _backend(row: Row) -> str:
    return row.backend + ("*" if row.by_others else "")


def figures(row: Row) -> tuple[str, ...]:
    """A row as text, in the order of `HEADINGS`; no figure for what is wrong.

    Half the distance of the quartiles, relative to the median; the speed in floor bytes; how many times as fast as torch.
    """
    if row.seconds is None or row.baseline_seconds is None or row.fraction_of_copy is None or not row.quartile_seconds:
        return ("wrong", *[""] * (len(HEADINGS) - 1))
    first, third = row.quartile_seconds
    return (
        milliseconds(row.seconds),
        f"{(third - first) / 2 / row.seconds:.0%}",
        f"{row.floor_bytes / row.seconds / GIGA:.1f}",
        f"{row.fraction_of_copy:.2f}",
        milliseconds(row.baseline_seconds),
        f"{row.baseline_seconds / row.seconds:.2f}x",
    )


def threaded(count: int) -> str:
    """A number of threads in words."""
    return f"{count} thread{'s' * (count > 1)}"


def notes(rows: Sequence[Row], skipped: Sequence[str], machine: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines below the tables: wrong results, asterisks, copies, baselines, jobs left out, the host."""
    for row in rows:
        if row.wrong:
            yield f"WRONG: {row.operation} on {row.backend}, {_title(row)}: {row.wrong}"
    yield from dict.fromkeys(f"{row.backend}*: {_shared_out(row)}" for row in rows if row.by_others)
    for threads, speeds in _copies(rows).items():
        low, high = min(speeds) / GIGA, max(speeds) / GIGA
        yield f"copies on {threaded(threads)}: {low:.1f} to {high:.1f} GB/s, read and written"
    for operation, baseline in dict.fromkeys((row.operation.partition("=")[0], row.baseline) for row in rows):
        yield f"torch for {operation}: {baseline}"
    yield from (f"not measured: {each}" for each in skipped)
    about = [machine["processor"], *machine["gpus"], f"{machine['cores']} cores"]
    yield f"{', '.join(about)}, load {machine['load']:.1f} before the start, torch {torch.__version__}"


def _shared_out(row: Row) -> str:
    return ", ".join(f"{operation} by {other}" for operation, other in row.by_others.items())


def _copies(rows: Sequence[Row]) -> dict[int, list[float]]:
    speeds: dict[int, list[float]] = {}
    for row in rows:
        if row.copy_bytes_per_second:
            speeds.setdefault(row.threads, []).append(row.copy_bytes_per_second)
    return speeds
