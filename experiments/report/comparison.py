"""A comparison's section, and its own page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..results import table
from ..results.comparison import Results
from ..results.recommendation import recommendation
from ..results.time_to_loss import meaning
from .section import Section, pictures_in, text_of, write_page

REMARKS = (
    "Speed-up is that of a step over the first row. Sent bytes are one rank's. The ratio is the bytes of an uncompressed "
    "float32 ring all-reduce over them. Encode, wait and decode overlap with the backward pass."
)


def write_report(results: Results, pictures: Sequence[Path], path: Path) -> None:
    """Table, verdict, pictures, configuration and environment of one comparison, for each network that it had."""
    title = f"gradwire compare: {results.model['name']} on {results.data['name']}"
    write_page(title, comparison_sections(results, pictures), path)


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
        remarks=f"{meaning(results)} {REMARKS}".strip(),
        pictures=pictures_in(dict.fromkeys(pictures, "")),
        details={
            **({"Command": results.command} if results.command else {}),
            "Data": source,
            "Configuration": text_of(results.config),
            "Environment": text_of({"torch": results.torch, **results.environment}),
        },
    )
