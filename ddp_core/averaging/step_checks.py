"""Checks between two steps: thrown-away gradients, diverging error feedback, parameters that differ between ranks."""

from __future__ import annotations

import functools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS as LBFGSOptimizer
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..memory.bucket_memory import BucketMemory
from ..transport.protocol import Transport
from ..transport.rank_messages import checksum, exchange
from ..transport.swap_agreement import Agreement

FEW, NUMBERS = 3, 64  # parameters that are watched, and how many numbers of each
REPLICA_STEPS = 100  # from one comparison of the ranks' parameters to the next
MESSAGE = (
    "gradients were averaged and then cleared, with no optimizer step between: a part of them is in the residuals and comes "
    "back with later ones. Run a backward whose gradients you throw away inside no_sync(), or call discard_step() of the "
    "handle after it. If you use them, as PCGrad and GradNorm do with an averaged backward for each loss, take a compressor "
    "without error feedback: int8, or error_feedback=false"
)
AGAIN = (
    "gradients that were averaged are averaged again: a backward was added to an average, with no optimizer step between. "
    "Compression rounds the whole sum anew each time, so errors grow. Run all backwards of a step but the last one, forward "
    "included, inside no_sync(). Until then a step in watch is one micro-batch"
)
LBFGS = (
    "L-BFGS takes the curvature from differences of gradients, and compression changes these: it ends worse than "
    "uncompressed. Use the compressor none with L-BFGS"
)
ADVICE = "Give the compressor error_feedback=0.9 or less, or a warm-up (start_iter=); or lower the learning rate"
ROOMS = ("compress", "ddp_core", "hooks", "kernels")  # in a clone scripts of users may lie beside them
OURS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, *map(Path(__file__).parents[2].joinpath, ROOMS))
)
LOOKS = 4  # averages that were not added to, until no more are looked at


@dataclass(frozen=True)
class ParameterSnapshot:
    """A parameter at the beginning of a step."""

    version: int
    gradient: weakref.ref[Tensor] | None
    numbers: Tensor

    def cleared(self, then: ParameterSnapshot) -> bool:
        """Return True if the gradient was cleared since `then` and the parameter's version has not changed."""
        before = then.gradient and then.gradient()
        kept = before is not None and self.gradient is not None and before is self.gradient()
        return then.gradient is not None and not kept and self.version == then.version


class DiscardedGradientCheck:
    """Warns once, and watches the smallest `parameters` of the first bucket until then.

    A parameter that has kept its numbers proves nothing: its gradient or the learning rate may be 0, and fused optimizers
    do not change its version. So it warns only where an optimizer of torch.optim holds a parameter, and did not step.
    """

    def __init__(self) -> None:
        self.parameters: Sequence[Tensor] = ()
        self._seen: list[ParameterSnapshot] = []
        self.warned = False
        self._suspected = False  # gradients were cleared, as far as is known without a step
        self._stepped = False  # an optimizer has, since the last look
        self._optimizer: weakref.ref[Optimizer] | None = None  # the last one that has
        # its class's method; torch.compile of torch 2.8 replaces it by one that calls no hooks
        self._step: object = None

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Look at some of these from the next step on, unless it has warned already."""
        self.parameters, self._seen = () if self.warned else sorted(parameters, key=Tensor.numel)[:FEW], []
        self._suspected = False
        if (known := self._known()) is None or not _holds(known, self.parameters):
            self._optimizer = None
        if self.parameters:
            _watching().add(self)

    def look(self) -> None:
        """Note the gradients and numbers that parameters have now. A shard has its own numbers."""
        self._seen = []
        for parameter in self.parameters:
            gradient = None if parameter.grad is None else weakref.ref(parameter.grad)
            local: Tensor = getattr(parameter.detach(), "to_local", parameter.detach)()
            self._seen.append(ParameterSnapshot(parameter._version, gradient, local.flatten()[:NUMBERS].clone()))

    def check(self, counts: Callable[[], bool]) -> None:
        """Compare at the beginning of a step with the last look, and look. `counts`: the step before does."""
        if self._suspected:
            return
        before = self._seen
        self.look()
        stepped, self._stepped = self._stepped, False
        pairs = list(zip(self._seen, before, strict=False))
        if stepped or not (before and all(now.cleared(then) for now, then in pairs) and counts()):
            return
        if all(torch.equal(now.numbers, then.numbers) for now, then in pairs):
            self._suspected = True
            self._warn()
        else:  # written through .data; comparing numbers again would hold up a GPU
            self.watch(())

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped, if it holds a watched parameter."""
        if self.parameters and isinstance(optimizer, LBFGSOptimizer) and _holds(optimizer, self.parameters):
            self.warned = True  # its line search clears gradients between its steps
            warnings.warn(LBFGS, stacklevel=3)
            self.watch(())
        elif self.parameters and (optimizer is self._known() or _holds(optimizer, self.parameters)):
            self._optimizer, self._step, self._stepped = weakref.ref(optimizer), type(optimizer).step, True
            self._warn()

    def _known(self) -> Optimizer | None:
        """The optimizer that has stepped, if its next step will be noted, too."""
        optimizer = None if self._optimizer is None else self._optimizer()
        return optimizer if optimizer is not None and type(optimizer).step is self._step else None

    def _warn(self) -> None:
        """Warn if gradients were cleared without a step, and there is an optimizer whose steps are noted."""
        if self._suspected and self._known() is not None:
            self.warned = True
            warnings.warn(MESSAGE, stacklevel=3)
            self.watch(())


def _level_of_script() -> int:
    """Return the `stacklevel` with which the caller's warning shows the script's line, not one of torch or gradwire."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        level, frame = level + 1, frame.f_back
    return level


def _holds(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Return True if any of the parameters is the optimizer's."""
    wanted = set(map(id, parameters))
    return any(not wanted.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)


@functools.cache
def _watching() -> weakref.WeakSet[DiscardedGradientCheck]:
    """Return the checks that hear of the steps of optimizers, from the first call on."""
    watching: weakref.WeakSet[DiscardedGradientCheck] = weakref.WeakSet()

    @torch._disable_dynamo  # a compiled function may step
    def stepped(optimizer: Optimizer, *_: Any) -> None:
        for each in list(watching):
            each.note_step(optimizer)

    register_optimizer_step_post_hook(stepped)
    return watching


class RepeatedAverageCheck:
    """Warns once of gradients that are averaged again, with others added to them. It watches one parameter.

    `agreement`: it counts the steps that have begun.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement, self._averaged = agreement, 0  # steps begun when a gradient came last
        self._version = self._looks = 0
        self.suspected = self._over = False
        self._parameter: weakref.ref[Tensor] | None = None
        self._hook: RemovableHandle | None = None

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Look at the smallest of these from the next backward on, unless all there is to see was seen."""
        self._stop()
        found = [each for each in parameters if each.requires_grad and each.is_leaf]
        if found and not self._over:
            parameter = min(found, key=Tensor.numel)
            self._parameter, self._version = weakref.ref(parameter), parameter._version
            self._averaged, self.suspected = self._agreement.step - 1, False
            self._hook = parameter.register_hook(self._gradient_comes)

    def warn(self, *, spoken: bool) -> None:
        """End the look as a step begins whose gradients were added to an average, as is `suspected`: warn if `spoken`."""
        self._end()
        if spoken:
            warnings.warn(AGAIN, stacklevel=_level_of_script())

    @torch._disable_dynamo
    def _gradient_comes(self, _: Tensor) -> None:
        """A gradient is there, and not added yet to those before."""
        parameter, steps = self._parameter() if self._parameter is not None else None, self._agreement.step
        if parameter is None:
            return
        averaged, unchanged = steps > self._averaged, parameter._version == self._version
        self._averaged, self._version = steps, parameter._version
        gradient = parameter.grad
        if gradient is None or not unchanged:
            self.suspected = False
        elif averaged:
            self.suspected = bool(gradient.coalesce().values().any() if gradient.is_sparse else gradient.any())
        self._looks += averaged
        if self._looks == LOOKS and not self.suspected:
            self._end()

    def _end(self) -> None:
        self._over, self.suspected = True, False
        self._stop()

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class DivergenceCheck:
    """Warns once, of the first bucket whose error feedback diverges."""

    _warned = False

    def check(self, live: Iterable[tuple[tuple[str, ...], BucketMemory]]) -> None:
        """Look at the gauges of all buckets. `live`: see `ModelMemory`."""
        for names, bucket in () if self._warned else live:
            gauge = bucket.gauge
            if gauge is not None and gauge.runs_away:
                self._warned = True
                warnings.warn(
                    f"error feedback diverges in the bucket of {names[0]}: the residual is {gauge.residual_ratio:.0f}x the "
                    f"gradient (cosine between intended and sent update {gauge.cosine:.2f}). {ADVICE}",
                    stacklevel=2,
                )
                return


class ReplicaCheck:
    """Compares the parameters of ranks that may round differently, every `REPLICA_STEPS` steps, until it has warned.

    `transport`: between these ranks; None where all ranks round alike, which is nothing to check.
    """

    transport: Transport | None = None

    def check(self, step: int, buckets: Iterable[Sequence[Tensor]]) -> None:
        """Compare the parameters of all buckets before a step; the first rank warns. A collective call at some steps."""
        transport = self.transport
        if transport is None or step % REPLICA_STEPS:
            return
        sums = exchange(" ".join(map(checksum, buckets)), transport, what="checksums of their parameters")
        differing = [rank for rank, other in enumerate(sums) if other != sums[0]]
        if not differing:
            return
        self.transport = None
        if transport.ranks.rank == 0:
            warnings.warn(
                f"the models have drifted apart: after {step} steps the parameters of ranks {differing} differ from those "
                "of rank 0. Install the same versions on all ranks, and load one rank's checkpoint on all of them",
                stacklevel=2,
            )
