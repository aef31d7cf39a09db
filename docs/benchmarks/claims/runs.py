"""Every finished run of the files whose runs no sweep shows: a table per folder, so that none is left out."""

from collections.abc import Iterator, Mapping
from typing import Any

from claims.claim import ROOT, raw

FOLDERS = (
    "docs/benchmarks/h200",
    "docs/results/loss",
    "docs/results/papers",
    "docs/results/p3-accuracy",  # its sweep shows the runs of its last configuration alone
)
BASE = "none"
SKIPPED = ("losses", "text", "tuned", "peak_memory_bytes", "above_none")
ALIKE = ("seed", "optimizer", "steps", "size", "batch", "task", "call")  # what a run and its baseline share


def files(folder: str) -> list[str]:
    """Return the files of runs of a folder: JSON lines, and JSON with `runs`."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("*.json*"))
    return [file for file in found if file.endswith(".jsonl") or "runs" in raw(file)]


def finished(file: str) -> list[Mapping[str, Any]]:
    """Return the runs of a file."""
    found = raw(file) if file.endswith("l") else raw(file)["runs"]
    return [row for each in found for row in each.get("rows", [each])]


def above(run: Mapping[str, Any], all_runs: list[Mapping[str, Any]]) -> str:
    """Return per cent of a run's loss above that of `none` with the same settings and seed; empty without one."""
    base = [
        other["loss"]
        for other in all_runs
        if other.get("compressor") == BASE and other.get("loss") and all(other.get(k) == run.get(k) for k in ALIKE)
    ]
    return f"{100 * (run['loss'] / base[0] - 1):+.2f}" if base and isinstance(run.get("loss"), float) else ""


def rows(folder: str) -> Iterator[list[str]]:
    """Yield the head and a row per finished run of a folder's files."""
    of_files = {file: finished(file) for file in files(folder)}
    columns = list(
        dict.fromkeys(key for found in of_files.values() for run in found for key in run if key not in SKIPPED)
    )
    columns = [key for key in columns if any(_scalar(run.get(key)) for found in of_files.values() for run in found)]
    yield ["file", *columns, "per cent above none"]
    for file, found in of_files.items():
        for run in found:
            yield [file.rpartition("/")[2], *(_shown(run.get(key)) for key in columns), above(run, found)]


def _scalar(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value) if _scalar(value) else ""
