"""Run parts of the checks on ranks that share a card: python -m tests.gpu.shared_card PART... --out FOLDER [--cpu].

A part goes on where an earlier call of the same sources, into the same folder, has ended.
"""

import argparse
import json
import sys
import tarfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import gradwire

from .checks import checks_in
from .ranks import played, side_by_side

LIMIT = 450  # seconds of a part


@dataclass(frozen=True)
class Run:
    """The checks of a file on some ranks. `pace`: Gbit/s of each socket, 0 for an open link. `mps`: kernels run at once."""

    file: str
    ranks: int
    pace: float = 0.0
    mps: bool = True

    @property
    def label(self):
        """A name for its rows and logs."""
        return f"{self.file}-{self.ranks}" + (f"-{self.pace:g}gbit" if self.pace else "")


FIRST = Run("raw", 2, mps=False)  # nothing but another host's name is tried by it
PARTS = {
    "raw": (FIRST, Run("raw", 4)),
    "trainings": (Run("trainings", 4),),
    "changes": (Run("changes", 4),),
    "sharded": (Run("sharded", 4),),
    "faults": (Run("faults", 3, mps=False),),  # a client that is killed may disturb the server of MPS
    "paced": (Run("times", 2, pace=1), Run("times", 2, pace=10)),
    "open": (Run("times", 2), Run("times", 4)),
}


def about(cpu):
    """Return what the results are of."""
    from ..__main__ import sources

    gpu = None if cpu else torch.cuda.get_device_name(0)
    return {"sources": sources(), "torch": torch.__version__, "gradwire": gradwire.__version__, "gpu": gpu}


class Results:
    """Rows of all parts in one file, by run and check; those of an earlier call count if they are of the same sources."""

    def __init__(self, path, of):
        found = json.loads(path.read_text()) if path.exists() else {}
        same = {name: found.get(name) for name in of} == of
        self._path, self._of, self.rows = path, of, found["rows"] if same else []

    def done(self, run):
        """Return the checks of a run that were right."""
        return {row["check"] for row in self.rows if row["run"] == run.label and row["ok"]}

    def add(self, run, row):
        """Put a row in place of an earlier one of the same check, and write the file."""
        key = run.label, row["check"]
        kept = [each for each in self.rows if (each["run"], each["check"]) != key]
        self.rows = [*kept, {"run": run.label, **row}]
        self._path.write_text(json.dumps({**self._of, "rows": self.rows}, indent=1) + "\n")

    def missing(self, run, names):
        """Return those of a run's checks that have no row or were wrong."""
        return [name for name in names if name not in self.done(run)]


@contextmanager
def packed(logs):
    """Pack what ranks wrote into one file beside the folder of logs, in the end: a lent machine returns few files."""
    logs.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with tarfile.open(logs.parent / "logs.tgz", "w:gz") as archive:
            for each in sorted([*logs.glob("*.log"), *logs.glob("*.jsonl")]):
                archive.add(each, f"{logs.name}/{each.name}")


def play(run, options, results, deadline):
    """Run what is missing of a run. Return the checks that are not right in the end."""
    table = {
        name: each for name, each in checks_in(run.file, run.ranks).items() if not options.only or name in options.only
    }
    left = {name: table[name] for name in results.missing(run, table)}
    with side_by_side(run.mps and not options.cpu and bool(left)) as at_once:
        rows = played(
            options.out / "shared", run.label, run.file, run.ranks, left, deadline, cpu=options.cpu, pace=run.pace
        )
        for row in rows:
            results.add(run, {**row, "mps": at_once})
            verdict, seconds = "ok" if row["ok"] else "WRONG", row.get("seconds", 0.0)
            print(
                f"{run.label:18} {row['check']:28} {verdict:6} {seconds:7.2f} s  {str(row['told'])[:300]}", flush=True
            )
    return results.missing(run, table)


def main():
    """Return 0 where all checks of the parts are right, 1 where any is not, 3 where ranks cannot share the card."""
    parser = argparse.ArgumentParser(prog="tests.gpu.shared_card", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder for shared.json, shared/ and logs.tgz")
    parser.add_argument("--cpu", action="store_true", help="over Gloo on CPUs, which tries the checks themselves")
    parser.add_argument("--only", nargs="*", help="checks to run, by name")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds")
    options = parser.parse_args()
    with packed(options.out / "shared"):
        return played_parts(options)


def played_parts(options):
    """Run the parts; the exit code."""
    results, deadline = Results(options.out / "shared.json", about(options.cpu)), time.monotonic() + options.limit
    wrong = []
    for run in (run for part in options.parts for run in PARTS[part]):
        if not options.cpu and run != FIRST and results.missing(FIRST, checks_in(FIRST.file, FIRST.ranks)):
            print(f"ranks do not share this card: {FIRST.label} is not right, see {options.out / 'shared'}")
            return 3
        wrong += [f"{run.label} {name}" for name in play(run, options, results, deadline)]
    print(f"not right, or not reached: {', '.join(wrong)}" if wrong else "all is right")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
