"""The files of the studies in docs/results, written anew from their points: tables, pages and pictures.

    python docs/benchmarks/write_studies.py                       # all of them
    python docs/benchmarks/write_studies.py quality gpt-bandwidth

Studies of a paper's figures share one page, docs/results/ddp.md or p3.md, so their folders have none.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path

from claims.claim import RESULTS

from gradwire.experiments.cli.commands import COMMANDS
from gradwire.experiments.cli.parsing import configuration
from gradwire.experiments.sweep.command import outcome_of, written
from gradwire.experiments.sweep.outcome import PAGE
from gradwire.experiments.sweep.points import POINTS, Finished
from gradwire.experiments.sweep.points import written as line_of

ONE_PAGE = ("ddp-", "p3-")


def round_points(file: Path) -> None:
    """Write all points of a file again, superseded ones too, with as many digits as a sweep keeps."""
    known = {field.name for field in fields(Finished)}
    lines = map(json.loads, file.read_text("utf-8").splitlines())
    points = [Finished(**{name: value for name, value in line.items() if name in known}) for line in lines]
    file.write_text("".join(line_of(each) + "\n" for each in points), "utf-8")


def write_study(name: str) -> None:
    """Write the table, the page and the pictures of a study."""
    folder = RESULTS / name
    round_points(folder / POINTS)
    command = f"gradwire sweep --config {name} --out docs/results/{name}"
    config = configuration(COMMANDS["sweep"], "gradwire sweep", ["--config", name])
    outcome = outcome_of(config, folder, command)
    if not outcome.finished:
        raise ValueError(f"no point of {folder} is one of the study {name}")
    outcome = written(outcome, folder)
    if name.startswith(ONE_PAGE):
        (folder / PAGE).unlink()
    for picture in folder.glob("*.png"):
        if picture.name not in outcome.pictures:
            picture.unlink()


def main(names: list[str]) -> None:
    """Write the studies with these names, or all."""
    for name in names or sorted(file.parent.name for file in RESULTS.glob(f"*/{POINTS}")):
        write_study(name)


if __name__ == "__main__":
    main(sys.argv[1:])
