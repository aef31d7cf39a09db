"""What a page shows of one set of results, and the page."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

PNG = b"\x89PNG\r\n\x1a\n"
TEMPLATE = "report.html.j2"


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
    """One set of results. `emphasis`: sentences to read first; `remarks`: below the table; `details`: title and text."""

    title: str
    about: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    emphasis: Sequence[str] = ()
    remarks: str = ""
    pictures: Sequence[Picture] = ()
    details: Mapping[str, str] = field(default_factory=dict)


def pictures_in(captions: Mapping[Path, str]) -> list[Picture]:
    """Those of the files that are PNG, by their first bytes: a page holds no other, whatever results name as a picture."""
    files = [path for path in captions if path.is_file()]
    return [Picture(path, captions[path] or path.stem) for path in files if path.read_bytes().startswith(PNG)]


def write_page(title: str, sections: Sequence[Section], path: Path) -> None:
    """Write the page, pictures inside."""
    environment = Environment(
        loader=PackageLoader("gradwire.experiments"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    path.write_text(environment.get_template(TEMPLATE).render(title=title, sections=sections), encoding="utf-8")


def text_of(value: Any) -> str:
    """A configuration or an environment, indented."""
    return json.dumps(value, indent=2, default=str)
