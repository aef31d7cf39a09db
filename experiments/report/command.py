"""The command: results of any command, from anywhere, on one page."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from ..results.comparison import Results
from ..results.files import check_file
from ..results.rows import flat, shown
from .page import Section, comparison_sections, pictures_in, text_of, write_page

logger = logging.getLogger(__name__)
MALFORMED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)  # of a foreign document
TEXTS = {"Command": "command", "Configuration": "config", "Environment": "environment"}
COLUMNS = {
    "bench": "model world_size ddp compressor bucket_mb process_groups sync_every overlap sec_per_iter.p50 sec_per_iter.p95 "
    "ex_per_sec.p50 phases.forward phases.backward phases.exposed phases.optimizer sent_bytes_per_step compression_ratio",
    "kernels": "operation backend dtype elements threads seconds fraction_of_copy baseline baseline_seconds correct",
    "collective": "backend world_size elements pieces seconds.p50 seconds.p95 bytes_per_second",
    "ready": "model parameter elements ready_elements seconds.min seconds.p50 seconds.max",
}
PAGE = "report.html"


@dataclass(frozen=True)
class ReportConfig:
    """Put the results of any commands into one HTML page that needs nothing beside it."""

    folders: list[str] = field(default_factory=list)
    """folders or JSON files with results of sweep, compare, bench, kernels, collective or ready"""
    title: str = "gradwire: results"
    """title of the page"""
    out: str = PAGE
    """HTML file to write"""

    def __post_init__(self) -> None:
        if not self.folders:
            raise ValueError("name at least one folder with results: gradwire report runs/powersgd docs/results")
        check_file("out", self.out)


def report_command(config: ReportConfig) -> int:
    """Write the page and say where it is; the command's exit code."""
    found = list(sections(Path(folder).expanduser() for folder in config.folders))
    path = Path(config.out).expanduser()
    write_page(config.title, found, path)
    console = Console(width=max(Console().width, 120))
    console.print(f"{len(found)} sets of results in {path}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _comparison(document: dict[str, Any], path: Path) -> Sequence[Section]:
    return comparison_sections(Results.read(path), [path.with_name(name) for name in ("loss.png", "tradeoff.png")])


def _sweep(document: dict[str, Any], path: Path) -> Sequence[Section]:
    columns, about = document["columns"], [document["source"], document["notes"], *document["labels"]]
    failures = [f"failed: {label}: {why.splitlines()[0]}" for label, why in document["failures"].items()]
    short = ["In short form: the figures mean nothing."] * document["short"]
    section = Section(
        title=document["title"],
        about=" ".join(filter(None, [*about, _versions(document)])),
        headings=columns,
        rows=[[shown(row.get(name)) for name in columns] for row in document["rows"]],
        emphasis=[*short, *failures],
        pictures=pictures_in({path.with_name(name): caption for name, caption in document["pictures"].items()}),
        details={"Commands": "\n".join(document["commands"]), **_details(document)},
    )
    return [section]


def _listed(kind: str, document: dict[str, Any], path: Path) -> Sequence[Section]:
    """A plain table of those columns that any row has, and what was emulated or set for any of them."""
    rows = [flat(row) for row in document["rows"]]
    used = [name for name in COLUMNS[kind].split() if any(row.get(name) is not None for row in rows)]
    labels = dict.fromkeys(label for row in rows for label in row.get("labels") or ())
    section = Section(
        title=f"gradwire {kind}",
        about=_versions(document),
        headings=used,
        rows=[[shown(row.get(name)) for name in used] for row in rows],
        emphasis=["; ".join(labels)] if labels else [],
        pictures=pictures_in({path.with_name(f"{kind}.png"): "floor bytes a second, by job and backend"}),
        details=_details(document),
    )
    return [section]


def _versions(document: Mapping[str, Any]) -> str:
    date = [str(document["date"])] if document.get("date") else []
    return ", ".join([*(f"{name} {document[name]}" for name in ("gradwire", "torch")), *date])


def _details(document: Mapping[str, Any]) -> dict[str, str]:
    found = {title: document[key] for title, key in TEXTS.items() if document.get(key)}
    return {title: each if isinstance(each, str) else text_of(each) for title, each in found.items()}


READERS: dict[str, Callable[[dict[str, Any], Path], Sequence[Section]]] = {
    "sweep": _sweep,
    "compare": _comparison,
    **{kind: partial(_listed, kind) for kind in COLUMNS},
}


def sections(places: Iterable[Path]) -> Iterator[Section]:
    """The results in files and folders, in the order given; a folder's are those below it, by name.

    Raises ValueError for a place that does not exist and for a file that no command wrote.
    """
    for place in places:
        if not (place.is_dir() or place.is_file()):
            raise ValueError(f"{place} is no file and no folder: name folders or JSON files with results")
        files = sorted(filter(Path.is_file, place.rglob("*.json"))) if place.is_dir() else [place]
        found = list(chain.from_iterable(map(_sections_of, files)))
        if not found:
            raise ValueError(f"{place} has no results: no JSON file of {', '.join(READERS)} in it")
        yield from found


def _sections_of(path: Path) -> Sequence[Section]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s is left out: %s", path, error)
        return ()
    kind = str(document.get("kind")) if isinstance(document, dict) else None
    if kind not in READERS:
        logger.info("%s is left out: no command of gradwire wrote it", path)
        return ()
    try:
        return READERS[kind](document, path)
    except MALFORMED as error:
        raise ValueError(f"{path} is no file of gradwire {kind}: {error!r}") from error
