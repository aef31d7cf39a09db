"""Experiment trackers, one run of theirs for each compressor."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any

from ..ranks.launchers import lab_here
from .comparison import RunResult

WANDB_HOST = "api.wandb.ai"
logger = logging.getLogger(__name__)
PATIENCE = {"init_timeout": 15.0, "finish_timeout": 60.0}  # seconds for wandb's network, in its own settings


def check_loggers(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown tracker and ModuleNotFoundError for one that is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"unknown logger {name!r}; there are: {', '.join(LOGGERS)}")
        import_module(name)


def log(trackers: Sequence[str], name: str, run: RunResult, config: Mapping[str, Any], out: Path) -> None:
    """Give a finished run to the trackers, as a run of theirs. Their errors are logged: none ever ends a command."""
    for tracker in trackers:
        try:
            LOGGERS[tracker](name, run, {**config, "compressor": run.compressor}, out)
        except Exception as error:
            logger.warning("%s did not log all of %s: %s", tracker, name, _in_one_line(error))


def log_to_wandb(name: str, run: RunResult, config: Mapping[str, Any], out: Path) -> None:
    """Weights & Biases; offline without a key and in a lab, which has no way out, unless WANDB_MODE says otherwise.

    Where it cannot start online, a warning says why, and this run and all later ones of the process are offline.
    """
    import wandb

    known: dict[str, Any] = {key: PATIENCE[key] for key in PATIENCE if f"WANDB_{key.upper()}" not in os.environ}
    settings = wandb.Settings(**{key: value for key, value in known.items() if key in wandb.Settings.model_fields})
    about: dict[str, Any] = {"project": "gradwire", "group": out.name, "name": name, "config": config, "dir": out}
    start = partial(wandb.init, **about, reinit="finish_previous", settings=settings)
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_key() and lab_here() is None else "offline")
    try:
        found = start(mode=mode)
    except Exception as error:
        if mode != "online":
            raise
        logger.warning(
            "wandb does not start online (%s): runs are kept offline in %s, and `wandb sync` sends them later",
            _in_one_line(error),
            out / "wandb",
        )
        os.environ["WANDB_MODE"] = "offline"
        found = start(mode="offline")
    for step, (loss, seconds) in enumerate(zip(run.loss, run.train_seconds, strict=True), 1):
        found.log({"loss": loss, "seconds": seconds}, step=step)
    found.summary.update(figures(run))
    found.finish()


def log_to_tensorboard(name: str, run: RunResult, config: Mapping[str, Any], out: Path) -> None:
    """TensorBoard's event files, in `tensorboard/` of the output folder."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(out / "tensorboard" / re.sub(r"[^\w.=-]+", "_", name)) as writer:
        writer.add_text("config", str(config))
        for step, (loss, seconds) in enumerate(zip(run.loss, run.train_seconds, strict=True), 1):
            writer.add_scalar("loss", loss, step)
            writer.add_scalar("seconds", seconds, step)
        for figure, value in figures(run).items():
            writer.add_scalar(figure, value, run.steps)


LOGGERS: dict[str, Callable[[str, RunResult, Mapping[str, Any], Path], None]] = {
    "wandb": log_to_wandb,
    "tensorboard": log_to_tensorboard,
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


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _has_key() -> bool:
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc().authenticators(WANDB_HOST))
    except (OSError, NetrcParseError):
        return False
