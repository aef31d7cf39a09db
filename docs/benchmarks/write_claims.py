"""The figures of the pages, computed again from the raw points and written into them.

    python docs/benchmarks/write_claims.py

It also writes docs/results/claims.csv, where each claim has its value, interval, seeds, size, steps, computer, command,
commit and file, and a runs.csv with every finished run beside the files of runs that no sweep has written.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from statistics import mean

from claims import runs
from claims.claim import ROOT, Claim, last_commit
from claims.pages import all_claims, all_pages
from claims.render import written

from gradwire.experiments.results.statistics import interval

TABLE = ROOT / "docs" / "results" / "claims.csv"
SOURCE = ["parameters", "steps", "computer", "command", "commit", "file"]
HEAD = ["claim", "kind", "shown", "value", "interval", "seeds", *SOURCE]


def row_of(claim: Claim) -> list[str]:
    """Return the row of a claim. The interval is half of the 95 % interval of the mean, by Student's t.

    What was not measured over seeds has its least and its greatest value instead of a mean.
    """
    values, source = claim.values, claim.source
    width = f"{interval(values):.4g}" if len(values) > 1 and claim.kind == "measured" and not source.seeds else ""
    ends = (min(values), max(values)) if claim.kind != "measured" else (mean(values),) if values else ()
    value = " to ".join(dict.fromkeys(f"{end:.6g}" for end in ends))
    about = (source.model, source.steps, source.machine, source.command, last_commit(source.file), source.file)
    seeds = str(source.seeds or len(values)) if claim.kind == "measured" else ""
    return [claim.name, claim.kind, claim.text, value, width, seeds, *about]


def as_csv(rows: Iterable[Iterable[str]]) -> str:
    """Return rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def table_of(claims: Mapping[str, Claim]) -> str:
    """Return the CSV of all claims."""
    return as_csv([HEAD, *map(row_of, claims.values())])


def main() -> None:
    """Write the pages, the table of claims, and the tables of runs."""
    claims = all_claims()
    for name, page in all_pages(claims).items():
        file = ROOT / name
        file.write_text(written(file.read_text("utf-8"), page, claims), "utf-8")
    TABLE.write_text(table_of(claims), "utf-8")
    for folder in runs.FOLDERS:
        (ROOT / folder / "runs.csv").write_text(as_csv(runs.rows(folder)), "utf-8")


if __name__ == "__main__":
    main()
