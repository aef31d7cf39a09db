"""The sinks of reports: a terminal, a logger, an experiment tracker, or any callable."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from .report import Report

if TYPE_CHECKING:  # not with gradwire itself: it takes its time
    from rich.console import Console

logger = logging.getLogger(__name__)
PREFIX = "gradwire/"  # of names in a tracker
Sink: TypeAlias = Callable[[Report], None]
Callback: TypeAlias = Callable[[Mapping[str, float], int], object]


def sink_of(to: Any) -> Sink:
    """Return what hands a report to what the user gave. Raises TypeError for what takes no reports."""
    if to == "console":
        from rich.console import Console

        return partial(_print, Console(stderr=True, soft_wrap=True))
    if "rich.console" in sys.modules and isinstance(to, sys.modules["rich.console"].Console):
        return partial(_print, to)
    if isinstance(to, logging.Logger):
        return partial(_write, to)
    if callable(getattr(to, "add_scalar", None)):
        return partial(_give, partial(_add_scalars, to))
    if callable(getattr(to, "log", None)):
        return partial(_give, partial(_log, to))
    if callable(to):
        return partial(_give, to)
    raise TypeError(
        f"watch(to=...) takes 'console', a rich Console, a logging.Logger, a run of wandb, a SummaryWriter of TensorBoard, "
        f"a callable of (metrics, step), or None with a folder; got {to!r}"
    )


def _print(console: Console, report: Report) -> None:
    """A line of text, and one of advice."""
    from rich.text import Text

    head, _, rest = str(report).partition(" | ")
    console.print(Text.assemble((head, "bold"), f" | {rest}"), soft_wrap=True)
    if report.advice:
        console.print(Text(report.advice, "yellow"), soft_wrap=True)


def _write(to: logging.Logger, report: Report) -> None:
    """A record of the level INFO, and one of WARNING for advice."""
    to.info("%s", report)
    if report.advice:
        to.warning("%s", report.advice)


def _give(to: Callback, report: Report) -> None:
    """Numbers by name for a callable; advice goes to this module's logger."""
    if report.advice:
        logger.warning("%s", report.advice)
    to(dict(report.metrics), report.step)


def _add_scalars(writer: Any, numbers: Mapping[str, float], step: int) -> None:
    for name, value in numbers.items():
        writer.add_scalar(PREFIX + name, value, step)


def _log(run: Any, numbers: Mapping[str, float], step: int) -> None:
    """Into the row that the user's next `log` completes: a row of our own would shift wandb's count of steps."""
    run.log({PREFIX + name: value for name, value in {**numbers, "steps": step}.items()}, commit=False)
