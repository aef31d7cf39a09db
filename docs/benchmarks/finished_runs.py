"""The finished runs of a benchmark, in a JSON file that grows by a run at a time."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from driver import write_results

import gradwire


class FinishedRuns:
    """The runs of a file. A benchmark that starts again does not repeat them."""

    def __init__(self, file: Path) -> None:
        about = {"torch": torch.__version__, "gradwire": gradwire.__version__, "runs": []}
        self._file, self._kept = file, json.loads(file.read_text()) if file.exists() else about
        self._began = time.monotonic()  # the run under way

    def find(self, run: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the finished run with these values, or None."""
        return next((each for each in self._kept["runs"] if each.items() >= run.items()), None)

    def missing(self, runs: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yield the runs that the file lacks."""
        for run in runs:
            if self.find(run) is None:
                self._began = time.monotonic()
                yield run

    def add(self, run: Mapping[str, Any], **found: Any) -> None:
        """Print a run of `missing` with what it found, and write it."""
        self._kept["runs"].append({**run, **found})
        print(self._kept["runs"][-1], f"{time.monotonic() - self._began:.0f} s", flush=True)
        write_results(self._file, self._kept)
