"""The comparison as one HTML page, which needs no other file."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import table
from .comparison import Results
from .seeds import over_seeds, seeds_line
from .time_to_loss import meaning, steps_behind
from .verdict import filled, losses, recommendation

TEMPLATE = "report.html.j2"
REMARKS = (
    "Speed-up is that of a step over the first row. Sent bytes are one rank's. The ratio is the bytes of an uncompressed "
    "float32 ring all-reduce over them. Encode, wait and decode overlap with the backward pass. Planned memory "
    "is the compressor's state and work at peak, beyond that of torch's DDP: a dry run computes it."
)


def write_report(results: Results, pictures: Sequence[Path], path: Path) -> list[Path]:
    """Write table, verdict, configuration and environment for each network, and the pictures; return the page's path."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here, since it is optional

    environment = Environment(
        loader=PackageLoader("gradwire.experiments"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    title = f"gradwire compare: {results.model['name']} on {results.data['name']}"
    *others, last = results.by_network()  # the pictures show all networks of the first seed, and come with the last
    sections = [*(_section(each, ()) for each in others), _section(last, pictures)]
    path.write_text(environment.get_template(TEMPLATE).render(title=title, sections=sections), encoding="utf-8")
    return [path]


def _section(results: Results, pictures: Sequence[Path]) -> dict[str, Any]:
    """Return what the template shows of one network."""
    data, network = results.data, results.environment.get("network")
    seeds = [seeds_line(row) for row in over_seeds(results)]
    results = results.by_seed()[0]
    source = (
        f"{data['source']}: {data['train_samples']} samples to train on, {data['held_out_samples']} for validation."
    )
    told = meaning(results), steps_behind(results), losses(results), filled(results)
    return {
        "title": ", ".join(filter(None, [f"{results.model['name']} on {data['name']}", network])),
        "about": f"{results.model['parameters']:,} parameters, {results.ranks}; "
        f"gradwire {results.gradwire}, torch {results.torch}.",
        "headings": ("compressor", *table.HEADINGS, *table.DETAILS),
        "rows": [(row.compressor, *row.figures, *row.details) for row in table.rows(results)],
        "verdict": recommendation(results) if results.runs else "",
        "remarks": " ".join(filter(None, (*told, REMARKS, *seeds))),
        "pictures": {picture.stem: b64encode(picture.read_bytes()).decode() for picture in pictures},
        "details": {
            **({"Command": results.command} if results.command else {}),
            "Data": source,
            "Configuration": json.dumps(results.config, indent=2, default=str),
            "Environment": json.dumps({"torch": results.torch, **results.environment}, indent=2, default=str),
        },
    }
