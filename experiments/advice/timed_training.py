"""A copy of a training, whose steps are timed: when each gradient is ready, and when forward needs each parameter."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...compress import Optimizers, optimizers_of
from ...ddp_core.buckets.assignment import DEFAULT_CAP_MB, MEBIBYTE
from ...ddp_core.measure.clock import Clock
from ...ddp_core.overlap.pending_parameter import NEUTRAL
from ...ddp_core.reducer.autograd import compiles, scripted
from .shared_cores import Work

Loss = Callable[[nn.Module, Any], Tensor]  # of a model and a batch: a scalar
FREED = int(DEFAULT_CAP_MB * MEBIBYTE)  # bytes, as by DDP: glibc then keeps the memory of gradients, too


@dataclass(frozen=True)
class Computation:
    """A rank's computation in a step. `ready`: by parameter, seconds of backward until its gradient is there, in that order;
    `needed`: seconds of forward until that uses it.
    """

    forward: Work
    backward: Work
    optimizer: Work
    ready: Mapping[str, float]
    needed: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The seconds of a step that never communicates."""
        return self.forward.seconds + self.backward.seconds + self.optimizer.seconds


class Training:
    """A copy of a model and its optimizers: the user's own are not touched, nor is their random state.

    Raises ValueError where they cannot be copied, or the loss is no scalar with a gradient.
    """

    def __init__(self, model: nn.Module, loss_fn: Loss, batch: Any, optimizer: Optimizers, clock: Clock) -> None:
        several = optimizers_of(optimizer)
        try:
            self.model, self.optimizers = copy.deepcopy((model, several))
        except Exception as error:
            theirs = " and ".join(type(each).__name__ for each in several)
            raise ValueError(
                f"{type(model).__name__} and its {theirs} cannot be copied, and steps are tried on a "
                f"copy: advise before anything is put around the model, or on a model built anew. {error}"
            ) from error
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError(
                f"{type(model).__name__} has no parameters that require gradients: there is nothing to average"
            )
        self._outer = [p for p in model.parameters() if p.requires_grad]
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        self._loss_fn, self._batch, self._clock = loss_fn, batch, clock
        self._on_cuda = next(iter(self.parameters.values())).is_cuda
        self.seen = not (compiles() or scripted(self.model))  # else operations are not run one by one

    def step(self, *, notes_use: bool = False) -> TimedStep:
        """One step. `notes_use`: of parameters in forward, where that can be seen; it takes a little longer then."""
        self._clock.synchronize()
        with self._own_random(), torch.enable_grad():
            timed = self._timed(notes_use=notes_use and self.seen)
        self._clock.synchronize()
        return timed

    def step_through(self, model: nn.Module) -> None:
        """One step whose forward goes through `model`, which was put around the copy."""
        with self._own_random(), torch.enable_grad():
            self._checked(self._loss_fn(model, self._batch)).backward()
            self._update()

    def _update(self) -> None:
        for each in self.optimizers:
            each.step()
        for each in self.optimizers:
            each.zero_grad()

    def first_step(self) -> bool:
        """One that is not counted; whether every parameter got a gradient.

        Raises ValueError where it brings gradients to the model that was copied, or none to the copy; that model has its
        own back in any case.
        """
        torch.empty(FREED, dtype=torch.uint8, device="cpu")
        kept = [parameter.grad for parameter in self._outer]
        try:
            for parameter in self._outer:
                parameter.grad = None
            ready = self.step().ready
            strayed = not ready or any(parameter.grad is not None for parameter in self._outer)
        finally:
            for parameter, grad in zip(self._outer, kept, strict=True):
                parameter.grad = grad
        if strayed:
            raise ValueError(
                "loss_fn(model, batch) used another model than the one it is given, which is a copy: write the loss with "
                "its first argument"
            )
        return len(ready) == len(self.parameters)

    def _own_random(self) -> AbstractContextManager[None]:
        """Torch's random state is afterwards what it was."""
        return torch.random.fork_rng([next(iter(self.parameters.values())).device] if self._on_cuda else [])

    def _timed(self, *, notes_use: bool) -> TimedStep:
        used: dict[str, float] = {}
        ready: dict[str, float] = {}
        moments, processor = [self._clock.now()], [time.process_time()]

        def end_phase() -> None:
            moments.append(self._clock.now())
            processor.append(time.process_time())

        with UseNoted(self._names, used, self._clock) if notes_use else nullcontext():
            loss = self._checked(self._loss_fn(self.model, self._batch))
        end_phase()
        with self._ready_noted(ready):
            loss.backward()
        end_phase()
        self._update()
        end_phase()
        return TimedStep(moments, processor, ready, used)

    def _checked(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = (
                f"a tensor of {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
                if isinstance(loss, Tensor)
                else type(loss).__name__
            )
            raise ValueError(
                f"loss_fn(model, batch) returns a scalar with a gradient, made with the model that it is given; got {got}"
            )
        return loss

    @contextmanager
    def _ready_noted(self, ready: dict[str, float]) -> Iterator[None]:
        def note(parameter: Tensor) -> None:
            ready[self._names[parameter]] = self._clock.now()

        hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in self.parameters.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def computation(self, steps: Sequence[TimedStep]) -> Computation:
        """The median of timed steps; what forward needs when, of those that noted it. A gradient that none brought is ready
        at backward's end, and what no operation was seen to use is needed at once.
        """
        spans = [self._spans(step) for step in steps]
        phases = [
            Work(
                statistics.median(span[place][0] for span in spans), statistics.median(span[place][1] for span in spans)
            )
            for place in range(3)
        ]
        forward, backward, optimizer = phases
        ready = self._after(1, [step.ready for step in steps], steps, backward.seconds, missing=1.0)
        noting = [step for step in steps if step.used]
        needed = self._after(0, [step.used for step in noting], noting, forward.seconds, missing=0.0)
        in_order = sorted(ready, key=lambda name: ready[name])
        return Computation(forward, backward, optimizer, {name: ready[name] for name in in_order}, needed)

    def _spans(self, step: TimedStep) -> list[tuple[float, float]]:
        """(seconds, cores busy) of forward, backward and optimizer. A GPU is one core, and these have it to themselves."""
        found = []
        for place in range(3):
            seconds = self._clock.seconds(step.moments[place], step.moments[place + 1])
            worked = step.processor[place + 1] - step.processor[place]
            found.append((seconds, 1.0 if self._on_cuda else worked / seconds if seconds > 0 else 0.0))
        return found

    def _after(
        self,
        phase: int,
        marks: Sequence[Mapping[str, float]],
        steps: Sequence[TimedStep],
        seconds: float,
        *,
        missing: float,
    ) -> dict[str, float]:
        """By parameter, how far into a phase its mark is, in seconds of the median phase."""
        parts: dict[str, list[float]] = {name: [] for name in self.parameters}
        for noted, step in zip(marks, steps, strict=True):
            whole = max(self._clock.seconds(step.moments[phase], step.moments[phase + 1]), 1e-9)
            for name, mark in noted.items():
                parts[name].append(min(1.0, max(0.0, self._clock.seconds(step.moments[phase], mark) / whole)))
        return {name: seconds * (statistics.median(found) if found else missing) for name, found in parts.items()}


@dataclass(frozen=True)
class TimedStep:
    """The beginning of forward, and the ends of forward, backward and optimizer: by the clock, and in processor seconds.

    `ready`: when each gradient was there; `used`: when forward first used each parameter, where that was noted.
    """

    moments: Sequence[float]
    processor: Sequence[float]
    ready: Mapping[str, float]
    used: Mapping[str, float]


class UseNoted(TorchFunctionMode):
    """Notes when a parameter is first given to an operation of torch's."""

    def __init__(self, names: Mapping[Tensor, str], used: dict[str, float], clock: Clock) -> None:
        super().__init__()
        self._left, self._used, self._clock = dict(names), used, clock

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note, then do it."""
        if self._left and func not in NEUTRAL:
            for tensor in _tensors((args, kwargs or {})):
                if (name := self._left.pop(tensor, None)) is not None:
                    self._used[name] = self._clock.now()
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
