"""One setting in training: its turns, and what they took."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress.builder.optimizer_defaults import tuned_specification
from ...ddp_core import Decorator, exchange, over
from ...ddp_core.measure.clock import Clock, clock_of
from ..workloads.models.own import on_device
from ..workloads.order import BACKWARD, drain, ordered, waited_seconds
from .models import Task
from .rows import PHASES, Case, Measured
from .wrapping import slice_mb, traffic, wrapped

CHOSEN_AFTER = 12  # steps: an order of sending is chosen from the ninth on
LR, MOMENTUM, WEIGHT_DECAY = 0.001, 0.9, 1e-4  # as in PyTorch's benchmark


@dataclass(frozen=True)
class Setup:
    """Options that all settings share."""

    task: Task
    batch_size: int
    seed: int
    device: torch.device
    timeout: timedelta
    transport: Decorator | None = None


class LastGradient:
    """When the last gradient of a backward was there: made before a DDP wraps the model, so that its mark comes first.

    At first it watches all parameters; after `watch_last_only` only the one that came last, which costs the step nothing.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self._clock = clock
        self._last: Tensor | None = None
        self._hooks = {
            p: p.register_post_accumulate_grad_hook(self._ready) for p in model.parameters() if p.requires_grad
        }
        self.moment: float | None = None

    def _ready(self, parameter: Tensor) -> None:
        self._last, self.moment = parameter, self._clock.now()

    def watch_last_only(self) -> None:
        """Go on with the parameter that came last."""
        for parameter, hook in self._hooks.items():
            if parameter is not self._last:
                hook.remove()


class Trial:
    """A model of its own, trained with one setting on the ranks of `groups`; `control` is for what is not measured."""

    def __init__(
        self, case: Case, setup: Setup, groups: Sequence[dist.ProcessGroup], control: dist.ProcessGroup
    ) -> None:
        self.case, self._setup, self._control = case, setup, control
        self._clock = clock_of(setup.device)
        with torch.random.fork_rng():
            torch.manual_seed(setup.seed)
            model = setup.task.build().to(setup.device)
        self._last_gradient = LastGradient(model, self._clock)
        fused = setup.task.fused or None  # None: torch's choice
        optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY, fused=fused)
        self._ran = replace(case, compressor=tuned_specification(case.compressor, optimizer))
        self._model, self._handle = wrapped(model, optimizer, self._ran, groups, setup.timeout, setup.transport)
        self._optimizer = ordered(self._model, optimizer, case.order, case.bucket_mb)
        self._lead = 0 if case.order == BACKWARD else CHOSEN_AFTER
        generator = torch.Generator().manual_seed(setup.seed + groups[0].rank())
        self._batch = on_device(setup.task.sample(setup.batch_size, generator), setup.device)
        self._seconds: list[float] = []
        self._phases: dict[str, list[float]] = {name: [] for name in PHASES}

    def turn(self) -> None:
        """`sync_every` iterations, of which the last averages gradients and steps the optimizer.

        Where communication goes on through the next forward, that of a turn before comes first and what is left at the end
        is waited for behind the clock: so a turn has just one step's.
        """
        self._clock.synchronize()
        for _ in range(self._lead):
            self._iterations()
        self._lead = min(self._lead, 1)
        start = self._clock.now()
        marks = self._iterations()
        waited = waited_seconds(self._optimizer)
        drain(self._optimizer)
        self._clock.synchronize()
        iterations = self.case.sync_every
        self._seconds.append(self._clock.seconds(start, marks[-1][-1]) / iterations)
        for name, begin in zip(PHASES, range(len(PHASES)), strict=True):
            spans = (self._clock.seconds(moments[begin], moments[begin + 1]) for moments in marks)
            hidden = {"forward": -waited, "exposed": waited}.get(name, 0.0)
            self._phases[name].append((sum(spans) + hidden) / iterations)

    def _iterations(self) -> list[tuple[float, ...]]:
        """A step of the optimizer: when each of its iterations began, and when each of their phases ended."""
        iterations = self.case.sync_every
        return [self._iteration(synced=index == iterations - 1) for index in range(iterations)]

    def _iteration(self, *, synced: bool) -> tuple[float, ...]:
        """When it began, and when each of its phases ended."""
        begin = self._clock.now()
        with nullcontext() if synced else getattr(self._model, "no_sync", nullcontext)():
            loss = self._setup.task.loss(self._model, *self._batch)
            forward = self._clock.now()
            (loss / self.case.sync_every).backward()
        backward = self._clock.now()
        if synced:
            self._optimizer.step()
            self._optimizer.zero_grad()
        assert self._last_gradient.moment is not None
        return begin, forward, self._last_gradient.moment, backward, self._clock.now()

    def end_warmup(self) -> None:
        """Warm-up is over: measure from here on."""
        self._last_gradient.watch_last_only()
        self._seconds.clear()
        for phase in self._phases.values():
            phase.clear()

    def measured(self) -> Measured:
        """Return the measurements of this rank.

        Raises RuntimeError where the ranks have different parameters: their averages were not the same.
        """
        if self.case.ddp != "none":
            self._check()
        ranks = self._control.size()
        found = traffic(self._model, self.case, self._handle, ranks)
        tuned = None if self._ran == self.case else self._ran.compressor
        return Measured(self._seconds, self._phases, found, slice_mb(self._model, self._ran, ranks), tuned)

    def _check(self) -> None:
        bits = (parameter.detach().contiguous().view(-1).view(torch.int32) for parameter in self._model.parameters())
        sums = exchange(str(sum(int(each.sum(dtype=torch.int64)) for each in bits)), over(self._control))
        if len(set(sums)) > 1:
            raise RuntimeError(f"with {self.case} the ranks ended with different parameters: checksums {sums}")

    def close(self) -> None:
        """End the threads and process groups of the compression."""
        if self._handle is not None:
            self._handle.close()
