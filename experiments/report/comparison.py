"""A comparison's section, and its own page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..results import table
from ..results.comparison import Results, RunResult
from ..results.recommendation import recommendation
from ..results.time_to_loss import TimeToLoss, meaning, times_to_loss
from .chart import comparison_charts
from .section import Cell, Picture, Section, text_of, write_page

REMARKS = (
    "Speed-up is that of a step over the first row. Sent bytes are one rank's. The ratio is the bytes of an uncompressed "
    "float32 ring all-reduce over them. Encode, wait and decode overlap with the backward pass."
)


def write_report(results: Results, pictures: Sequence[Path], path: Path) -> None:
    """Table, verdict, charts, configuration and environment of one comparison, for each network that it had."""
    title = f"gradwire compare: {results.model['name']} on {results.data['name']}"
    write_page(title, comparison_sections(results, pictures), path)


def comparison_sections(results: Results, pictures: Sequence[Path]) -> list[Section]:
    """What a page shows of a comparison, for each network; pictures, which show all networks, come with the last."""
    networks = results.by_network()
    last = len(networks) - 1
    return [_section(each, pictures if index == last else ()) for index, each in enumerate(networks)]


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
        rows=[
            _cells(row, run, to_loss)
            for row, run, to_loss in zip(table.rows(results), results.runs, times_to_loss(results), strict=True)
        ],
        emphasis=[recommendation(results)] if results.runs else [],
        remarks=f"{meaning(results)} {REMARKS}".strip(),
        charts=comparison_charts(results) if results.runs else (),
        pictures=[Picture(picture, picture.stem) for picture in pictures],
        details={
            **({"Command": results.command} if results.command else {}),
            "Data": source,
            "Configuration": text_of(results.config),
            "Environment": text_of({"torch": results.torch, **results.environment}),
        },
    )


def _cells(row: table.Row, run: RunResult, to_loss: TimeToLoss | None) -> list[Cell]:
    values = (
        run.step_seconds["p50"],
        1 / run.step_seconds["p50"],
        to_loss.seconds if to_loss else None,
        run.sent_bytes_per_step,
        run.compression_ratio,
        table.final_loss(run),
        run.eval.loss,
        run.eval.accuracy,
        run.step_seconds["p95"],
        run.seconds.encode,
        run.seconds.wait,
        run.seconds.decode,
        run.peak_memory_bytes,
    )
    texts = (*row.figures, *row.details)
    return [Cell(row.compressor), *(Cell(text, value) for text, value in zip(texts, values, strict=True))]
