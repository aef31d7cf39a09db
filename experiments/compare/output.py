"""What a comparison leaves behind and shows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from ..report.page import write_report
from ..results.comparison import Results
from ..results.optional import optional_files
from ..results.recommendation import recommendation
from ..results.table import table

TABLE_WIDTH = 132  # columns, so that no cell breaks


def write_output(results: Results, out: Path) -> None:
    """Print a table and a verdict for each network, then draw pictures, write the report, and say where everything is.

    Where matplotlib or jinja2 is not installed, a line says so in place of what it is for.
    """
    console = Console(width=max(Console().width, TABLE_WIDTH))
    for each in results.by_network():
        console.print(table(each))
        console.print(recommendation(each), "", soft_wrap=True, sep="\n")
    say = partial(console.print, sep="", highlight=False, markup=False, soft_wrap=True)
    say("results    ", out / "results.json")
    pictures, where = optional_files(partial(_drawn, results, out))
    say("pictures   ", where)
    _, where = optional_files(partial(write_report, results, pictures, out / "report.html"))
    say("report     ", where)


def _drawn(results: Results, out: Path) -> Sequence[Path]:
    from ..results.picture import draw  # here, since matplotlib is optional

    return draw(results, out)
