"""A comparison's section, and its own page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..results import table
from ..results.comparison import Results, RunResult
from ..results.recommendation import recommendation
from .section import Cell, Picture, Section, text_of, write_page

REMARKS = (
    "Speed is relative to the first row. Sent bytes are one rank's; the ratio is what a dense float32 ring all-reduce sends "
    "over them. Encode, wait and decode overlap with the backward pass."
)


def write_report(results: Results, pictures: Sequence[Path], path: Path) -> None:
    """Table, verdict, pictures, configuration and environment of one comparison."""
    section = comparison_section(results, pictures)
    write_page(f"gradwire compare: {section.title}", [section], path)


def comparison_section(results: Results, pictures: Sequence[Path]) -> Section:
    """What a page shows of a comparison."""
    data = results.data
    about = (
        f"{results.model['parameters']:,} parameters, {results.ranks}; "
        f"gradwire {results.gradwire}, torch {results.torch}."
    )
    source = f"{data['source']}: {data['train_samples']} samples to train on, {data['held_out_samples']} held out."
    return Section(
        title=f"{results.model['name']} on {data['name']}",
        about=about,
        headings=("compressor", *table.HEADINGS, *table.DETAILS),
        rows=[_cells(row, run) for row, run in zip(table.rows(results), results.runs, strict=True)],
        emphasis=[recommendation(results)] if results.runs else [],
        remarks=REMARKS,
        pictures=[Picture(picture, picture.stem) for picture in pictures],
        details={
            **({"Command": results.command} if results.command else {}),
            "Data": source,
            "Configuration": text_of(results.config),
            "Environment": text_of({"torch": results.torch, **results.environment}),
        },
    )


def _cells(row: table.Row, run: RunResult) -> list[Cell]:
    values = (
        run.step_seconds["p50"],
        run.step_seconds["p95"],
        1 / run.step_seconds["p50"],
        run.sent_bytes_per_step,
        run.compression_ratio,
        table.final_loss(run),
        run.eval.loss,
        run.eval.accuracy,
        run.seconds.encode,
        run.seconds.wait,
        run.seconds.decode,
        run.peak_memory_bytes,
    )
    texts = (*row.figures, *row.details)
    return [Cell(row.compressor), *(Cell(text, value) for text, value in zip(texts, values, strict=True))]
