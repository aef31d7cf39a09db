"""Experiment trackers, one run of theirs for each compressor."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any

from .results import RunResult

WANDB_HOST = "api.wandb.ai"


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
    """Weights & Biases; offline unless there is a key or WANDB_MODE says otherwise."""

    def __init__(self, spec: str, config: Mapping[str, Any], out: Path) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        self._run = wandb.init(
            project="gradwire", group=out.name, name=spec, config={**config, "compressor": spec}, dir=out, mode=mode
        )

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
        "peak_memory_bytes": run.peak_memory_bytes,
    }


def check_loggers(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown tracker and ModuleNotFoundError for one that is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"unknown logger {name!r}; there are: {', '.join(LOGGERS)}")
        import_module(LOGGERS[name][0])


def open_loggers(names: Sequence[str], spec: str, config: Mapping[str, Any], out: Path) -> list[RunLogger]:
    """The trackers of one run."""
    return [LOGGERS[name][1](spec, config, out) for name in names]


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc().authenticators(WANDB_HOST) is not None
    except (OSError, NetrcParseError):
        return False
