"""What a comparison leaves behind and shows."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from .results import Results
from .table import table, verdict


def finish(results: Results, out: Path) -> None:
    """Draw the pictures, write the report, print the table, the verdict and where everything is."""
    from .plots import draw  # here, since matplotlib and jinja2 are optional
    from .report import write_report

    pictures = draw(results, out)
    write_report(results, pictures, out / "report.html")
    console = Console(width=max(Console().width, 120))
    console.print(table(results))
    console.print(verdict(results), soft_wrap=True)
    console.print("\nresults    ", out / "results.json", sep="", highlight=False)
    console.print("pictures   ", ", ".join(map(str, pictures)), sep="", highlight=False, markup=False, soft_wrap=True)
    console.print("report     ", out / "report.html", sep="", highlight=False)
