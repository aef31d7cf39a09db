"""The command: results from anywhere on one page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ..results.files import check_file

PAGE = "report.html"


@dataclass(frozen=True)
class ReportConfig:
    """Put the results of any commands into one HTML page that needs nothing beside it."""

    folders: list[str] = field(default_factory=list)
    """folders or JSON files with results of sweep, compare, bench, kernels, collective or ready"""
    title: str = "gradwire: results"
    """title of the page"""
    out: str = PAGE
    """HTML file to write"""

    def __post_init__(self) -> None:
        if not self.folders:
            raise ValueError("name at least one folder with results: gradwire report runs/powersgd docs/results")
        check_file("out", self.out)


def report_command(config: ReportConfig) -> int:
    """Write the page and say where it is; the command's exit code."""
    from .reading import sections  # here, since jinja2 is optional
    from .section import write_page

    found = list(sections(Path(folder).expanduser() for folder in config.folders))
    path = Path(config.out).expanduser()
    write_page(config.title, found, path)
    console = Console(width=max(Console().width, 120))
    console.print(f"{len(found)} sets of results in {path}", highlight=False, markup=False, soft_wrap=True)
    return 0
