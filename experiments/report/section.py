"""What a page shows of one set of results, and the page."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..results.rows import shown
from .chart import Chart

PNG = b"\x89PNG\r\n\x1a\n"
TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class Cell:
    """Text of a table, and the number that its column is sorted by (None: the text itself)."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Picture:
    """A PNG file, and what it shows."""

    path: Path
    caption: str

    @property
    def data(self) -> str:
        """The file's bytes in base64."""
        return b64encode(self.path.read_bytes()).decode()


@dataclass(frozen=True)
class Section:
    """One set of results. `emphasis`: sentences to read first; `remarks`: below the table; `details`: title and text.

    Where there are charts, pictures are for browsers without scripts.
    """

    title: str
    about: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    emphasis: Sequence[str] = ()
    remarks: str = ""
    charts: Sequence[Chart] = ()
    pictures: Sequence[Picture] = ()
    details: Mapping[str, str] = field(default_factory=dict)


def is_picture(path: Path) -> bool:
    """Return True for a PNG file, by its first bytes: a page holds no other file, whatever results name as a picture."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(PNG)) == PNG


def write_page(title: str, sections: Sequence[Section], path: Path) -> None:
    """Write the page, pictures and script inside."""
    path.write_text(_page(title, sections), encoding="utf-8")


def check_page(sections: Sequence[Section]) -> None:
    """Raise what writing a page with these sections would raise, as malformed results do."""
    _page("", sections)


def _page(title: str, sections: Sequence[Section]) -> str:
    environment = Environment(
        loader=PackageLoader("gradwire.experiments"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(title=title, sections=sections)


def text_of(value: Any) -> str:
    """A configuration or an environment, indented."""
    return json.dumps(value, indent=2, default=str)


def cell(value: Any) -> Cell:
    """A value of a result's row, as `gradwire sweep` shows it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(shown(value), float(value) if number else None)
