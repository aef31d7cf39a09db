"""Experiment trackers, one run of theirs for each compressor."""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, ClassVar

from ..ranks.launchers import lab_here
from .comparison import RunResult

logger = logging.getLogger(__name__)
WANDB_HOST = "api.wandb.ai"
PATIENCE = {"init_timeout": 15.0, "finish_timeout": 60.0}  # seconds for wandb's network, in its own settings


class RunLogger(ABC):
    """Where the figures of one run go."""

    @abstractmethod
    def step(self, step: int, loss: float, seconds: float) -> None:
        """The loss at a step, `seconds` of training after the first."""

    @abstractmethod
    def summary(self, numbers: Mapping[str, float], steps: int) -> None:
        """The figures of the whole run of `steps` steps, by name; nothing comes after them."""

    def finish(self, run: RunResult) -> None:
        """The figures of a training."""
        self.summary(figures(run), run.steps)


class WandbLogger(RunLogger):
    """Weights & Biases; offline without a key and in a lab, which has no way out, unless WANDB_MODE says otherwise.

    Where it cannot start online, one warning says why, and this run and all later ones of the process are offline.
    """

    reachable: ClassVar[bool] = True

    def __init__(self, spec: str, config: Mapping[str, Any], out: Path) -> None:
        import wandb

        start = partial(
            wandb.init,
            project="gradwire",
            group=out.name,
            name=spec,
            config={**config, "compressor": spec},
            dir=out,
            reinit="finish_previous",  # one that was dropped may still be open
            settings=wandb.Settings(**_patience(wandb.Settings.model_fields)),
        )
        mode: Any = _wandb_mode()
        try:
            self._run = start(mode=mode)
        except Exception as error:
            if mode != "online":
                raise
            WandbLogger.reachable = False
            logger.warning(
                "wandb does not start online (%s): runs are kept offline in %s, and `wandb sync` sends them later",
                _in_one_line(error),
                out / "wandb",
            )
            self._run = start(mode="offline")

    def step(self, step: int, loss: float, seconds: float) -> None:
        self._run.log({"loss": loss, "seconds": seconds}, step=step)

    def summary(self, numbers: Mapping[str, float], steps: int) -> None:
        self._run.summary.update(dict(numbers))
        self._run.finish()


class TensorBoardLogger(RunLogger):
    """TensorBoard's event files, in `tensorboard/` of the output folder."""

    def __init__(self, spec: str, config: Mapping[str, Any], out: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(out / "tensorboard" / re.sub(r"[^\w.=-]+", "_", spec))
        self._writer.add_text("config", str({**config, "compressor": spec}))

    def step(self, step: int, loss: float, seconds: float) -> None:
        self._writer.add_scalar("loss", loss, step)
        self._writer.add_scalar("seconds", seconds, step)

    def summary(self, numbers: Mapping[str, float], steps: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, steps)
        self._writer.close()


class Guarded(RunLogger):
    """A tracker that is dropped at its first error, with one warning: none ever ends a training."""

    def __init__(self, name: str, opened: Callable[[], RunLogger]) -> None:
        self._name = name
        self._tracker: RunLogger | None = None
        with self._dropped_on_error():
            self._tracker = opened()

    def step(self, step: int, loss: float, seconds: float) -> None:
        if self._tracker is not None:
            with self._dropped_on_error():
                self._tracker.step(step, loss, seconds)

    def summary(self, numbers: Mapping[str, float], steps: int) -> None:
        if self._tracker is not None:
            with self._dropped_on_error():
                self._tracker.summary(numbers, steps)

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tracker = None
            logger.warning("%s gets no more of this run: %s", self._name, _in_one_line(error))


LOGGERS: dict[str, tuple[str, Callable[[str, Mapping[str, Any], Path], RunLogger]]] = {
    "wandb": ("wandb", WandbLogger),
    "tensorboard": ("tensorboard", TensorBoardLogger),
}


def figures(run: RunResult) -> dict[str, float]:
    """The numbers of a run by flat names; `train/loss` is that of its last step."""
    return {
        "train/loss": run.loss[-1],
        "eval/loss": run.eval.loss,
        "eval/accuracy": run.eval.accuracy,
        **{f"step_seconds/{name}": value for name, value in run.step_seconds.items()},
        **{f"seconds/{name}": value for name, value in vars(run.seconds).items()},
        "payload_bytes_per_step": run.payload_bytes_per_step,
        "sent_bytes_per_step": run.sent_bytes_per_step,
        "compression_ratio": run.compression_ratio,
        **({} if run.peak_memory_bytes is None else {"peak_memory_bytes": run.peak_memory_bytes}),
    }


def check_loggers(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown tracker and ModuleNotFoundError for one that is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"unknown logger {name!r}; there are: {', '.join(LOGGERS)}")
        import_module(LOGGERS[name][0])


def open_loggers(names: Sequence[str], spec: str, config: Mapping[str, Any], out: Path) -> list[RunLogger]:
    """The trackers of one run. Their errors, now and later, are logged and not raised."""
    return [Guarded(name, partial(LOGGERS[name][1], spec, config, out)) for name in names]


def _wandb_mode() -> str:
    if not WandbLogger.reachable:
        return "offline"
    return os.environ.get("WANDB_MODE") or ("online" if _has_key() and lab_here() is None else "offline")


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _patience(known: Container[str]) -> dict[str, Any]:
    """Those of `PATIENCE` that this version of wandb knows and that no variable of the user's sets."""
    return {
        name: seconds
        for name, seconds in PATIENCE.items()
        if name in known and f"WANDB_{name.upper()}" not in os.environ
    }


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc().authenticators(WANDB_HOST) is not None
    except (OSError, NetrcParseError):
        return False
