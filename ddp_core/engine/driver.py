"""The interface of drivers, which carry tasks, and the pendings that they return."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ..transport.protocol import Pending
from .task import Task

OnEnd: TypeAlias = Callable[[Task, BaseException | None], BaseException | None]  # told once of each task; what to raise


class Driver(Protocol):
    """Carries tasks from round to round, in the order in which they are submitted."""

    def submit(self, task: Task) -> Pending:
        """Take a task behind those before; returns at once."""

    def send_all(self) -> None:
        """Let no request of what was submitted depend on anybody's waiting, where any does."""
        return None

    def follow(self) -> None:
        """Have the current stream of a GPU wait for all that was submitted."""
        return None

    def close(self, deadline: float) -> None:
        """End what runs between calls, if anything does, once what is queued is done."""
        return None


@dataclass(frozen=True)
class ResultPending:
    """The result of a Python future. Ctrl-C ends a wait for it, which it does not for a future of torch's."""

    future: Future[Tensor]

    def wait(self, timeout: timedelta) -> Tensor:
        """Its value, when it is there. Whoever fills it keeps the time limit of each round, also of the tasks before."""
        return self.future.result()


class FuturePending:
    """The result of a future. Whoever fills it keeps the time limit."""

    def __init__(self, future: torch.futures.Future[Tensor]) -> None:
        self.future = future

    def wait(self, timeout: timedelta) -> Tensor:
        """Its value, when it is there."""
        return self.future.wait()
