"""`gradwire diff`: two files of the benchmark side by side, for people and for continuous integration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..results.files import check_file
from .difference import as_text, missing, model_tables, regressions, unmatched
from .files import differing, paired, read
from .show import PLAIN

REGRESSION = 1  # exit code


@dataclass(frozen=True)
class DiffConfig:
    """Two files of `gradwire bench --json`, the baseline and the test (or two of PyTorch's benchmark)."""

    base: str = ""
    """file with the baseline, from gradwire bench --json"""
    test: str = ""
    """file to compare with the baseline"""
    fail_over: float | None = None
    """exit with code 1 if a row's 75th-percentile step time grew by more than this many percent, or a row is
    missing"""
    html: str | None = None
    """also write the comparison to this HTML file"""

    def __post_init__(self) -> None:
        if self.fail_over is not None and not self.fail_over >= 0:
            raise ValueError(f"fail_over is a number of percent, at least 0, got {self.fail_over}")
        check_file("html", self.html)


def diff_command(config: DiffConfig) -> int:
    """Show the difference; the exit code: 1 for a regression that is not allowed."""
    if not config.base or not config.test:
        raise ValueError("diff compares two files: gradwire diff BASE.json TEST.json")
    base, test = read(Path(config.base)), read(Path(config.test))
    pairs = paired(base, test)
    if not pairs.both:
        raise ValueError(f"{config.base} and {config.test} have no model, batch size and number of ranks in common")
    facts, parts = differing(base, test), model_tables(pairs)
    failures = [] if config.fail_over is None else [*regressions(parts, config.fail_over), *missing(pairs)]
    console = Console()
    console.print(*as_text(facts, parts, pairs), *failures, sep="\n", **PLAIN)
    if config.html:
        from .diff_page import write_page  # here, since jinja2 is optional

        write_page(Path(config.html).expanduser(), (base, test), facts, parts, [*unmatched(pairs), *failures])
        console.print(f"page    {config.html}", **PLAIN)
    return REGRESSION if failures else 0
