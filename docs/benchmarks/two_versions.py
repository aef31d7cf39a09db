"""Step times of one version of gradwire against another's: step_time.py by two interpreters, run by run in turn.

    python two_versions.py --old OLD/bin/python --new NEW/bin/python --runs 6 --json result.json -- \\
        -m torch.distributed.run --nproc-per-node 2 step_time.py torch:none@25 gradwire:none@25 --steps 12

Each interpreter has one version installed. What follows `--` is given to both, with the interpreter for {python}. It tells
the median seconds of each case, and over pairs of runs the median of how many times as fast the new version is, with its
extremes. Machines wander: seconds are compared within a pair only.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from driver import parser_of, write_results
from rich.console import Console
from rich.table import Table


def medians(python: str, command: list[str]) -> dict[str, float]:
    """The median seconds of each case in one run."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        mine = [python if word == "{python}" else word for word in command]
        subprocess.run([python, *mine, "--json", str(result)], check=True, stdout=subprocess.DEVNULL)
        return {case["case"]: case["median_s"] for case in json.loads(result.read_text())["cases"]}


def rows(old: list[dict[str, float]], new: list[dict[str, float]]) -> list[dict[str, float | str]]:
    """Each case: both versions' seconds, and speeds of pairs of runs."""
    found = []
    for case in new[0]:
        speeds = [before[case] / after[case] for before, after in zip(old, new, strict=True)]
        seconds = {
            name: statistics.median(run[case] for run in runs) for name, runs in (("old_s", old), ("new_s", new))
        }
        found.append(
            {"case": case, **seconds, "speed": statistics.median(speeds), "low": min(speeds), "high": max(speeds)}
        )
    return found


def main() -> None:
    """Run both in turn, the first one first in every other pair, and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--old", required=True, help="an interpreter")
    parser.add_argument("--new", required=True, help="another one")
    parser.add_argument("--runs", type=int, default=6, help="of each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[arguments.command[:1] == ["--"] :]
    old: list[dict[str, float]] = []
    new: list[dict[str, float]] = []
    for run in range(arguments.runs):
        turns = [(arguments.old, old), (arguments.new, new)]
        for python, measured in turns[::-1] if run % 2 else turns:
            measured.append(medians(python, command))
    table = Table(title="seconds a step, median of runs; speed of the new version over pairs of runs")
    for heading in ("case", "old", "new", "speed", "least", "most"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    found = rows(old, new)
    for row in found:
        speeds = [f"{row[key]:.3f}x" for key in ("speed", "low", "high")]
        table.add_row(str(row["case"]), f"{row['old_s']:.4f}", f"{row['new_s']:.4f}", *speeds)
    Console(width=110).print(table)
    write_results(arguments.json, {"runs": arguments.runs, "command": command, "cases": found})


if __name__ == "__main__":
    main()
