"""Results of a comparison, and the file that keeps them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from .files import write_json

KIND = "compare"
ONE_PROCESS, SIMULATED = "one process", "simulated ranks"  # backend and network where ranks are simulated
NO_LINK = "no emulated link"  # network of runs beside others over one


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation on validation samples.

    Attributes:
        loss: mean validation loss, in nats.
        accuracy: fraction of right answers.
    """

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Seconds:
    """Mean seconds per step of a compressor on this rank's host, all buckets together. They overlap with backward.

    Attributes:
        encode: before the first request.
        wait: waits for replies.
        decode: arithmetic after the first reply.
    """

    encode: float
    wait: float
    decode: float


@dataclass(frozen=True)
class RunResult:
    """One training with one compressor. The page on results describes each attribute."""

    compressor: str
    steps: int
    loss: tuple[float, ...]
    eval: Evaluation
    step_seconds: Mapping[str, float]
    seconds: Seconds
    payload_bytes_per_step: int
    sent_bytes_per_step: float
    compression_ratio: float
    peak_memory_bytes: int | None
    train_seconds: tuple[float, ...]
    parameters_digest: str
    total_sent_bytes: float
    warmed_up: bool = True
    network: str | None = None
    turn_steps: int | None = None
    planned_bytes: int | None = None
    planned_state_bytes: int | None = None
    tuned: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Results:
    """All runs of a comparison, and what they share. The page on results describes each attribute."""

    world_size: int
    backend: str
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    config: Mapping[str, Any]
    runs: tuple[RunResult, ...]
    environment: Mapping[str, Any]
    command: str = ""
    gradwire: str = field(default_factory=lambda: __version__)
    torch: str = torch.__version__
    over_seeds: tuple[Mapping[str, Any], ...] = ()

    @property
    def ranks(self) -> str:
        """The ranks in words: `2 ranks, gloo on cpu, emulated link 100mbit`."""
        return ranks_on(self.world_size, self.backend, self.environment.get("device"), self.environment.get("network"))

    def by_network(self) -> list[Results]:
        """A comparison for each network that runs had, in the order run; this one where all had the same."""
        networks = dict.fromkeys(run.network for run in self.runs)
        return [self._on(network) for network in networks] if len(networks) > 1 else [self]

    def by_seed(self) -> list[Results]:
        """A comparison for each seed."""
        seeds = dict.fromkeys(run.seed for run in self.runs)
        return [dataclasses.replace(self, runs=tuple(r for r in self.runs if r.seed == seed)) for seed in seeds]

    def _on(self, network: str | None) -> Results:
        runs = tuple(run for run in self.runs if run.network == network)
        return dataclasses.replace(self, runs=runs, environment={**self.environment, "network": network})

    def write(self, path: Path) -> None:
        """Write the results as JSON, whole or not at all. Numbers that are not finite become null.

        Args:
            path: the file.

        Raises:
            ValueError: the file cannot be written.
        """
        document = dataclasses.asdict(self)
        ordered = {key: document.pop(key) for key in ("gradwire", "torch", "command")} | document
        write_json(_finite({"kind": KIND, **ordered}), str(path))

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read results that `write` wrote. Null becomes NaN in losses and evaluations.

        Args:
            path: the file.

        Returns:
            The results.

        Raises:
            ValueError: `gradwire compare` did not write the file.
        """
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("kind") != KIND:
            raise ValueError(f"{path} is no file of gradwire compare")
        runs, over_seeds = (tuple(document.pop(name)) for name in ("runs", "over_seeds"))
        return cls(**document, runs=tuple(map(_run, runs)), over_seeds=over_seeds)


def ranks_on(count: int, backend: str, device: str | None, network: str | None) -> str:
    """Return the number of ranks, and where they ran, in words.

    >>> ranks_on(2, "gloo", "cpu", "emulated link 100mbit")
    '2 ranks, gloo on cpu, emulated link 100mbit'
    """
    where = f"{backend} on {device}" if device else backend
    return ", ".join([f"{count} ranks", where, *([network] if network else [])])


def _run(entry: dict[str, Any]) -> RunResult:
    known = {
        "loss": tuple(math.nan if loss is None else loss for loss in entry["loss"]),
        "eval": Evaluation(**{key: math.nan if value is None else value for key, value in entry["eval"].items()}),
        "seconds": Seconds(**entry["seconds"]),
        "train_seconds": tuple(entry["train_seconds"]),
    }
    return RunResult(**{**entry, **known})


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
