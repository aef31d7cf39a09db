"""From the JSON of a command to flat rows: column name to value, nested names joined by dots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..network.lab.utilization import Utilization
from ..results.rows import Row, flat
from .columns import RUNS, SOURCE, without_suffix

USE = "netlab.utilization"  # a file of the point's, read into its rows
USED_BY = "bench"  # the command whose points may have it
STEPS_WATCHED = 2  # the last ones of a point whose links are watched
LINK_SECONDS, LINK_SENT = "link.seconds", "link.sent_mbit"
STEP, CURVE = "step", "loss"  # a curve of steps is known from that of losses, and not stored
DIGITS, DIGITS_OF_A_LIST = 6, 5  # that are stored of a number, and of each number of a list, which are many
SOMETIMES = {"bench": (LINK_SECONDS, LINK_SENT)}  # columns of some points only, as their options are


def _compare(document: Mapping[str, Any]) -> list[Row]:
    network = document["environment"].get("network")
    shared = {
        "model": document["model"]["name"],
        "data": document["data"]["name"],
        "world_size": document["world_size"],
        SOURCE: document["data"]["source"],
    }
    runs = [flat(run) for run in document["runs"]]
    for run in runs:  # each has a network of its own where several were compared
        run["labels"] = list(filter(None, [run.get("network") or network]))
    return [restored({**shared, **run}) for run in runs]


def _listed(document: Mapping[str, Any]) -> list[Row]:
    return [flat(each) for each in document["rows"]]


READERS: dict[str, Callable[[Mapping[str, Any]], list[Row]]] = {
    "bench": _listed,
    "collective": _listed,
    "compare": _compare,
    "ready": _listed,
}


def rows_of(command: str, document: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[Row]:
    """The rows of one point, with its values of the grid where the command does not tell them itself.

    Raises ValueError where the document has no rows.
    """
    rows = READERS[command](document)
    if not rows:
        raise ValueError(f"{command} measured nothing")
    return [{**{key: value for key, value in chosen.items() if column_of(key, row) not in row}, **row} for row in rows]


def stored(row: Row) -> Row:
    """Return a row as its file has it: rounded, and without the curve of steps."""
    return {name: _rounded(value, DIGITS) for name, value in row.items() if name != STEP}


def restored(row: Row) -> Row:
    """Return a row of a file with its curve of steps."""
    curve = row.get(CURVE)
    return {**row, STEP: list(range(1, len(curve) + 1))} if isinstance(curve, list) else row


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, list):
        return [_rounded(each, DIGITS_OF_A_LIST) for each in value]
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else float(f"{value:.{digits}g}")  # bytes are counted exactly


def check_columns(named: Sequence[str], command: str, rows: Sequence[Row]) -> None:
    """Raise ValueError for columns that a study names and no row has, with those there are.

    Columns that only some points have, or only means, are never refused.
    """
    there = dict.fromkeys(column for row in rows for column in row)
    known = {*there, *SOMETIMES.get(command, ()), RUNS}
    if unknown := [name for name in named if without_suffix(column_of(name, rows[0])) not in known]:
        raise ValueError(
            f"the points have finished without columns that the study names: {', '.join(unknown)}; there are: "
            f"{', '.join(there)}. Mend the study and run it again: finished points are kept"
        )


def column_of(key: str, row: Mapping[str, Any]) -> str:
    """The column that holds a grid's key: itself, or its singular where the command lists several.

    >>> column_of("compressors", {"compressor": "none"}), column_of("steps", {})
    ('compressor', 'steps')
    """
    singular = key.removesuffix("s")
    return singular if key not in row and singular in row else key


def link_use(rows: list[Row], use: Utilization) -> list[Row]:
    """A point's only row, with what host 0 sent in the last two steps: link.seconds, and link.sent_mbit a second.

    Raises ValueError where several settings ran in the point: whose traffic it is could not be told.
    """
    if len(rows) != 1:
        raise ValueError(
            f"the use of links is that of one setting a point, and here are {len(rows)}: put them in the grid"
        )
    [row] = rows
    sent, (_, end) = use.rates(0, "sent_bytes"), use.busy(0)
    begin = end - STEPS_WATCHED * row["sec_per_iter.p50"]
    shown = [(when - begin, rate) for when, rate in zip(use.seconds[1:], sent, strict=True) if begin <= when <= end]
    seconds, rates = ([round(value, 3) for value in column] for column in zip(*shown, strict=True))
    return [{**row, LINK_SECONDS: seconds, LINK_SENT: rates}]
