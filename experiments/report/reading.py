"""From files of any command to sections."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ..results.comparison import Results
from ..results.rows import Row, flat
from .comparison import comparison_sections
from .section import Picture, Section, cell, check_page, is_picture, text_of

MALFORMED = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    ArithmeticError,
    RecursionError,
)  # of a foreign document
logger = logging.getLogger(__name__)
BENCH_COLUMNS = (
    "model",
    "world_size",
    "ddp",
    "compressor",
    "bucket_mb",
    "process_groups",
    "sync_every",
    "overlap",
    "sec_per_iter.p50",
    "sec_per_iter.p95",
    "ex_per_sec.p50",
    "phases.forward",
    "phases.backward",
    "phases.exposed",
    "phases.optimizer",
    "sent_bytes_per_step",
    "compression_ratio",
)
KERNEL_COLUMNS = (
    "operation",
    "backend",
    "dtype",
    "elements",
    "threads",
    "seconds",
    "fraction_of_copy",
    "baseline",
    "baseline_seconds",
    "correct",
)
COLLECTIVE_COLUMNS = ("backend", "world_size", "elements", "pieces", "seconds.p50", "seconds.p95", "bytes_per_second")
READY_COLUMNS = ("model", "parameter", "elements", "ready_elements", "seconds.min", "seconds.p50", "seconds.max")


def _comparison(document: dict[str, Any], path: Path) -> Sequence[Section]:
    pictures = [path.with_name(name) for name in ("loss.png", "tradeoff.png")]
    return comparison_sections(Results.read(path), list(filter(is_picture, pictures)))


def _sweep(document: dict[str, Any], path: Path) -> Sequence[Section]:
    columns, about = document["columns"], [document["source"], document["notes"], *document["labels"]]
    pictures = {path.with_name(name): caption for name, caption in document["pictures"].items()}
    failures = [f"failed: {label}: {why.splitlines()[0]}" for label, why in document["failures"].items()]
    short = ["In short form: the figures mean nothing."] * document["short"]
    section = Section(
        title=document["title"],
        about=" ".join(filter(None, [*about, _versions(document)])),
        headings=columns,
        rows=[[cell(row.get(name)) for name in columns] for row in document["rows"]],
        emphasis=[*short, *document["verdicts"], *failures],
        pictures=[Picture(file, caption or file.stem) for file, caption in pictures.items() if is_picture(file)],
        details={"Commands": "\n".join(document["commands"]), **_details(document)},
    )
    return [section]


def _bench(document: dict[str, Any], path: Path) -> Sequence[Section]:
    rows = [flat(row) for row in document["benchmark_results"]]
    return [_listed("gradwire bench", rows, BENCH_COLUMNS, document)]


def _kernels(document: dict[str, Any], path: Path) -> Sequence[Section]:
    named = {**document, "environment": document["machine"]}
    section = _listed("gradwire kernels", document["rows"], KERNEL_COLUMNS, named)
    picture = Picture(path.with_name("kernels.png"), "floor bytes a second, by job and backend")
    return [dataclasses.replace(section, pictures=[picture] if is_picture(picture.path) else [])]


def _collective(document: dict[str, Any], path: Path) -> Sequence[Section]:
    return [_listed("gradwire collective", list(map(flat, document["rows"])), COLLECTIVE_COLUMNS, document)]


def _ready(document: dict[str, Any], path: Path) -> Sequence[Section]:
    return [_listed("gradwire ready", list(map(flat, document["rows"])), READY_COLUMNS, document)]


def _listed(title: str, rows: Iterable[Row], columns: Iterable[str], document: Mapping[str, Any]) -> Section:
    """A plain table of those columns that any row has, and what was emulated or set for any of them."""
    kept, found = list(rows), list(columns)
    used = [name for name in found if any(row.get(name) is not None for row in kept)]
    labels = dict.fromkeys(label for row in kept for label in row.get("labels") or ())
    return Section(
        title=title,
        about=_versions(document),
        headings=used,
        rows=[[cell(row.get(name)) for name in used] for row in kept],
        emphasis=["; ".join(labels)] if labels else [],
        details=_details(document),
    )


def _versions(document: Mapping[str, Any]) -> str:
    found = {name: document.get(name) or document.get("environment", {}).get(name) for name in ("gradwire", "torch")}
    date = [str(document["date"])] if document.get("date") else []
    return ", ".join([*(f"{name} {value}" for name, value in found.items() if value), *date])


def _details(document: Mapping[str, Any]) -> dict[str, str]:
    wanted = {"Command": "command", "Configuration": "config", "Environment": "environment"}
    found = {title: document[key] for title, key in wanted.items() if document.get(key)}
    return {title: each if isinstance(each, str) else text_of(each) for title, each in found.items()}


READERS: dict[str, Callable[[dict[str, Any], Path], Sequence[Section]]] = {
    "sweep": _sweep,
    "compare": _comparison,
    "bench": _bench,
    "kernels": _kernels,
    "collective": _collective,
    "ready": _ready,
}


def kind_of(document: Any) -> str | None:
    """Which command wrote a document; None for what is not gradwire's."""
    if not isinstance(document, dict):
        return None
    if (kind := str(document.get("kind"))) in READERS:
        return kind
    if {"runs", "world_size", "model"} <= document.keys():
        return "compare"
    return "kernels" if {"machine", "rows", "copy_bytes_per_second"} <= document.keys() else None


def sections(places: Iterable[Path]) -> Iterator[Section]:
    """The results in files and folders, in the order given; a folder's are those below it, by name.

    Raises ValueError for a place that does not exist and for a file that no command wrote.
    """
    for place in places:
        if not place.exists():
            raise ValueError(f"{place} does not exist: name folders or JSON files with results")
        if not (place.is_dir() or place.is_file()):
            raise ValueError(f"{place} is no regular file: name folders or JSON files with results")
        files = sorted(filter(Path.is_file, place.rglob("*.json"))) if place.is_dir() else [place]
        found = list(chain.from_iterable(map(_section, files)))
        if not found:
            raise ValueError(f"{place} has no results: no JSON file of {', '.join(READERS)} in it")
        yield from found


def _section(path: Path) -> Iterator[Section]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s is left out: %s", path, error)
        return
    kind = kind_of(document)
    if kind is None:
        logger.info("%s is left out: no command of gradwire wrote it", path)
        return
    try:
        found = READERS[kind](document, path)
        check_page(found)
        yield from found
    except MALFORMED as error:
        raise ValueError(f"{path} is not what gradwire {kind} writes: {error!r}") from error
