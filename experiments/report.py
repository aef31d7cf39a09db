"""The comparison as one HTML file that needs nothing beside it."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from . import table
from .results import Results

TEMPLATE = "report.html.j2"


def write_report(results: Results, pictures: Sequence[Path], path: Path) -> None:
    """Table, verdict, pictures, configuration and environment."""
    environment = Environment(
        loader=PackageLoader("gradwire.experiments"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template(TEMPLATE).render(
        results=results,
        headings=("compressor", *table.HEADINGS, *table.DETAILS),
        rows=[(row.compressor, *row.figures, *row.details) for row in table.rows(results)],
        verdict=table.verdict(results),
        pictures={picture.stem: b64encode(picture.read_bytes()).decode() for picture in pictures},
        config=json.dumps(results.config, indent=2),
        environment=json.dumps({"torch": results.torch, **results.environment}, indent=2),
    )
    path.write_text(page, encoding="utf-8")
