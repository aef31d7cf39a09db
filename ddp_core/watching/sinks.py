"""Where reports go: a terminal, a logger, an experiment tracker, or any callable."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from .report import Report

if TYPE_CHECKING:  # not with gradwire itself: it takes its time
    from rich.console import Console

logger = logging.getLogger(__name__)
PREFIX = "gradwire/"  # of names in a tracker
Sink: TypeAlias = Callable[[Report], None]
Callback: TypeAlias = Callable[[Mapping[str, float], int], object]


def sink_of(to: Any) -> Sink:
    """How to tell a report to what the user gave. Raises TypeError for what cannot be told anything."""
    if to == "console":
        from rich.console import Console

        return Terminal(Console(stderr=True, soft_wrap=True))
    if "rich.console" in sys.modules and isinstance(to, sys.modules["rich.console"].Console):
        return Terminal(to)
    if isinstance(to, logging.Logger):
        return Lines(to)
    if callable(getattr(to, "add_scalar", None)):
        return Numbers(lambda numbers, step: _add_scalars(to, numbers, step))
    if callable(getattr(to, "log", None)):
        return Numbers(lambda numbers, step: _log(to, numbers, step))
    if callable(to):
        return Numbers(to)
    raise TypeError(
        f"watch(to=...) takes 'console', a rich Console, a logging.Logger, a run of wandb, a SummaryWriter of TensorBoard, "
        f"a callable of (metrics, step), or None with a folder; got {to!r}"
    )


class Terminal:
    """A line of text each."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, report: Report) -> None:
        from rich.text import Text

        head, _, rest = str(report).partition(" | ")
        self._console.print(Text.assemble((head, "bold"), f" | {rest}"), soft_wrap=True)
        if report.advice:
            self._console.print(Text(report.advice, "yellow"), soft_wrap=True)


class Lines:
    """A record of the level INFO each."""

    def __init__(self, to: logging.Logger) -> None:
        self._to = to

    def __call__(self, report: Report) -> None:
        self._to.info("%s", report)
        if report.advice:
            self._to.warning("%s", report.advice)


class Numbers:
    """Numbers by name for a callable; advice goes to this module's logger."""

    def __init__(self, to: Callback) -> None:
        self._to = to

    def __call__(self, report: Report) -> None:
        if report.advice:
            logger.warning("%s", report.advice)
        self._to(dict(report.metrics), report.step)


def _add_scalars(writer: Any, numbers: Mapping[str, float], step: int) -> None:
    for name, value in numbers.items():
        writer.add_scalar(PREFIX + name, value, step)


def _log(run: Any, numbers: Mapping[str, float], step: int) -> None:
    """Into the row that the user's next `log` completes: a row of our own would shift wandb's count of steps."""
    run.log({PREFIX + name: value for name, value in {**numbers, "steps": step}.items()}, commit=False)
