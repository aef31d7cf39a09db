"""What a page shows of one set of results, such as a comparison, and the page."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..results import table
from ..results.comparison import Results
from ..results.recommendation import losses, recommendation
from ..results.time_to_loss import meaning

PNG = b"\x89PNG\r\n\x1a\n"
TEMPLATE = "report.html.j2"
REMARKS = (
    "Speed-up is that of a step over the first row. Sent bytes are one rank's. The ratio is the bytes of an uncompressed "
    "float32 ring all-reduce over them. Encode, wait and decode overlap with the backward pass. Planned memory "
    "is the compressor's state and work at peak, beyond that of torch's DDP: a dry run computes it."
)


@dataclass(frozen=True)
class Picture:
    """What a picture shows, and its PNG file in base64."""

    caption: str
    data: str


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
    found = {path: path.read_bytes() for path in captions if path.is_file()}
    pictures = {path: content for path, content in found.items() if content.startswith(PNG)}
    return [Picture(captions[path] or path.stem, b64encode(content).decode()) for path, content in pictures.items()]


def write_page(title: str, sections: Sequence[Section], path: Path) -> None:
    """Write the page, pictures inside."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here, since it is optional

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


def write_report(results: Results, pictures: Sequence[Path], path: Path) -> list[Path]:
    """Table, verdict, pictures, configuration and environment of one comparison, for each network that it had; where."""
    title = f"gradwire compare: {results.model['name']} on {results.data['name']}"
    write_page(title, comparison_sections(results, pictures), path)
    return [path]


def comparison_sections(results: Results, pictures: Sequence[Path]) -> list[Section]:
    """What a page shows of a comparison, for each network; pictures, which show all networks, come with the last."""
    *others, last = results.by_network()
    return [*(_section(each, ()) for each in others), _section(last, pictures)]


def _section(results: Results, pictures: Sequence[Path]) -> Section:
    data, network = results.data, results.environment.get("network")
    about = (
        f"{results.model['parameters']:,} parameters, {results.ranks}; "
        f"gradwire {results.gradwire}, torch {results.torch}."
    )
    source = f"{data['source']}: {data['train_samples']} samples to train on, {data['held_out_samples']} held out."
    return Section(
        title=", ".join(filter(None, [f"{results.model['name']} on {data['name']}", network])),
        about=about,
        headings=("compressor", *table.HEADINGS, *table.DETAILS),
        rows=[(row.compressor, *row.figures, *row.details) for row in table.rows(results)],
        emphasis=[recommendation(results)] if results.runs else [],
        remarks=f"{meaning(results)} {losses(results)} {REMARKS}".strip(),
        pictures=pictures_in(dict.fromkeys(pictures, "")),
        details={
            **({"Command": results.command} if results.command else {}),
            "Data": source,
            "Configuration": text_of(results.config),
            "Environment": text_of({"torch": results.torch, **results.environment}),
        },
    )
