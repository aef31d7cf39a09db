"""What a study file says."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..network.lab import NetlabConfig
from .derive import derivations
from .figure import Figure, figures_of
from .recommendation import Criterion, criterion_of
from .rows import READERS, USE, USED_BY

SHORTENED = ("base", "grid", "cases", "skip")
CASE = "case"  # the column that tells which


@dataclass(frozen=True)
class SweepConfig:
    """Run a command on every point of a grid, once each, and draw what came out."""

    title: str = ""
    """title of the study"""
    name: str = ""
    """name of the study on its page; a shipped study has its own"""
    source: str = ""
    """paper and figure that the study follows"""
    command: str = ""
    """command that runs at each point: bench, collective, compare or ready"""
    base: dict[str, Any] = field(default_factory=dict)
    """options of the command that all points share"""
    grid: dict[str, Any] = field(default_factory=dict)
    """options with a list of values each; the points are all their combinations"""
    cases: dict[str, Any] = field(default_factory=dict)
    """sets of options that change together, {name: {option: value}}; the grid runs for each set, and the column
    case names it"""
    skip: list[dict[str, Any]] = field(default_factory=list)
    """points of the grid to leave out: {column: [values]}, where all columns must match"""
    only: dict[str, Any] = field(default_factory=dict)
    """part of the grid to run and show: {column: [values]}"""
    mean_over: list[str] = field(default_factory=list)
    """columns, such as seed, to average over; NAME.spread shows the standard deviation"""
    shortened: dict[str, Any] = field(default_factory=dict)
    """values that --short replaces, key by key: {base: {...}, grid: {...}}; cases and skip as a whole"""
    derive: dict[str, Any] = field(default_factory=dict)
    """columns computed from others: {speedup: {of: COLUMN, against: {compressor: none}}}"""
    columns: list[str] = field(default_factory=list)
    """columns of the table; if not given, those of the grid and the figures"""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """pictures to draw: name, kind (line, bar, box), x, y, series and more"""
    verdict: dict[str, Any] = field(default_factory=dict)
    """column that decides whether compression pays: {of: COLUMN, each: [COLUMNS]}"""
    notes: str = ""
    """text that a reader of the results must know"""
    netlab: NetlabConfig = field(default_factory=NetlabConfig)
    """emulated hosts for all points, instead of the study's own"""
    limit: float = 600.0
    """longest time that one point may take, in seconds"""
    out: str | None = None
    """folder for points, table and pictures; runs/TITLE if not given"""
    short: bool = False
    """run the smallest form of the study: it takes seconds, and its figures mean nothing"""
    redraw: bool = False
    """draw the points that are there, and run nothing"""
    logger: list[str] = field(default_factory=list)
    """experiment trackers to log to: wandb, tensorboard"""

    def __post_init__(self) -> None:
        if self.command not in READERS:
            raise ValueError(
                f"command is one of {', '.join(READERS)}, got {self.command!r}: name a study, --config FILE"
            )
        for key, values in (*self.grid.items(), *self.shortened.get("grid", {}).items()):
            if not isinstance(values, list) or not values:
                raise ValueError(f"grid.{key} is a list of values, got {values!r}")
        if unknown := set(self.shortened) - set(SHORTENED):
            raise ValueError(f"shortened has {', '.join(SHORTENED)}, got {', '.join(sorted(unknown))}")
        if twice := self.lab.keys() & self.chosen_grid.keys():
            raise ValueError(
                f"the study varies {', '.join(sorted(twice))} itself: give --grid as well, or leave it out"
            )
        if self.command != USED_BY and (self.chosen_base.get(USE) or any(self.chosen_grid.get(USE, ()))):
            raise ValueError(f"{USE} is for points of {USED_BY}, whose steps are timed; leave it out of {self.command}")
        if not self.limit > 0:
            raise ValueError(f"limit is above 0 seconds, got {self.limit}")
        for place in (self.only, *self.skip):
            if unknown := place.keys() - {CASE, *self.chosen_grid}:
                raise ValueError(
                    f"only and skip name columns of the grid, {', '.join([CASE, *self.chosen_grid])}; got "
                    f"{', '.join(sorted(unknown))}"
                )
        derivations(self.derive)
        figures_of(self.figures)
        criterion_of(self.verdict)

    @property
    def chosen_base(self) -> Mapping[str, Any]:
        """The options of all points, of the short form if it is asked for, in the lab that is asked for."""
        return {**self.base, **(self.shortened.get("base", {}) if self.short else {}), **self.lab}

    @property
    def lab(self) -> Mapping[str, Any]:
        """What is given of the network lab, by option."""
        given, default = asdict(self.netlab), asdict(NetlabConfig())
        return {f"netlab.{name}": value for name, value in given.items() if value != default[name]}

    @property
    def chosen_grid(self) -> Mapping[str, list[Any]]:
        """The grid, of the short form if it is asked for."""
        return {**self.grid, **(self.shortened.get("grid", {}) if self.short else {})}

    @property
    def chosen_cases(self) -> Mapping[str, Mapping[str, Any]]:
        """The cases, of the short form if it is asked for."""
        return self.shortened.get("cases", self.cases) if self.short else self.cases

    @property
    def places(self) -> list[dict[str, Any]]:
        """The product of cases and grid, the last key varying fastest, without what is skipped or not asked for."""
        names = [*([CASE] if self.chosen_cases else []), *self.chosen_grid]
        values = [*([self.chosen_cases] if self.chosen_cases else []), *self.chosen_grid.values()]
        skip = self.shortened.get("skip", self.skip) if self.short else self.skip
        found = [dict(zip(names, each, strict=True)) for each in itertools.product(*values)]
        return [each for each in found if lies_in(each, self.only) and not any(lies_in(each, part) for part in skip)]

    @property
    def drawn(self) -> list[Figure]:
        """The pictures."""
        return figures_of(self.figures)

    @property
    def criterion(self) -> Criterion | None:
        """What the recommendations, `verdict` in the study file, go by."""
        return criterion_of(self.verdict)

    @property
    def shown(self) -> list[str]:
        """The columns of the table."""
        if self.columns:
            return self.columns
        drawn = [column for figure in self.drawn for column in figure.columns]
        return list(dict.fromkeys([*self.grid, *drawn, *self.derive]))


def lies_in(place: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether a place of the grid has one of a part's values in each of the part's columns.

    >>> lies_in({"seed": 1, "compressors": ["none", "int8"]}, {"seed": [0, 1], "compressors": "int8"})
    True
    """
    return all(not set(map(str, _listed(place[name]))).isdisjoint(map(str, _listed(part[name]))) for name in part)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
