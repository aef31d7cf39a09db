"""The difference as one HTML file that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from .difference import LEGEND, SHOWN, ModelTable
from .files import Benchmark

TEMPLATE = "bench_diff.html.j2"


def write_page(
    path: Path,
    files: tuple[Benchmark, Benchmark],
    facts: Sequence[tuple[str, str, str]],
    sections: Sequence[ModelTable],
    remarks: Sequence[str],
) -> None:
    """Write the page."""
    environment = Environment(
        loader=PackageLoader("gradwire.experiments"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template(TEMPLATE).render(
        base=files[0].path.name,
        test=files[1].path.name,
        facts=facts,
        sections=sections,
        percentiles=SHOWN,
        legend=LEGEND,
        remarks=remarks,
    )
    path.write_text(page, encoding="utf-8")
