"""The common part of handles of whole gradients and of shards: reports of cost, the loss scale, discarded steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compress import Optimizers, Spec, report_optimizer
from .averaging.averager import CompressedAverager
from .averaging.shard_averager import ShardAverager
from .averaging.shown_averages import OnAverage
from .measure.stats import Stats, metrics
from .measure.step import Step
from .memory.rescaled_residuals import LossScale, Scaler

if TYPE_CHECKING:
    from .watching.watch import Watch


CLOSED = (
    "the handle is closed, and reaches no model any more: call gradwire.attach again for another compressor, with a DDP "
    "model after you have wrapped it anew"
)


class Observed:
    """A handle, as far as it tells what its steps cost.

    `averager`: what it is the handle of. `optimizer`: that of `attach`, which `swap` sets a compressor for, too. It stays
    until the handle is closed, since all ranks have to choose the same.
    """

    averager: CompressedAverager | ShardAverager
    closed = False
    optimizer: Optimizers | None = None
    _loss_scale: LossScale | None = None

    def suit(self, optimizer: Optimizers | None, names: Mapping[Tensor, str], *specs: Spec) -> None:
        """Keep the optimizer that compressors were set for; warn if they depend on one that is missing or another model's.

        `names`: of the model's parameters that train, or empty if they were checked before.
        """
        if self.averager.engines.first:
            report_optimizer(optimizer, names, *specs)
        self.optimizer = optimizer

    def _refuse_closed(self) -> None:
        """Raise RuntimeError if the handle is closed."""
        if self.closed:
            raise RuntimeError(CLOSED)

    def _what(self) -> str:
        """Return a name of what is sent."""
        raise NotImplementedError

    @property
    def reported(self) -> CompressedAverager | ShardAverager:
        """The averager whose steps and bytes are reported."""
        return self.averager

    def stats(self) -> Stats:
        """Return rounds, bytes and seconds of the last synchronized step, by bucket, and in total."""
        return self.reported.stats()

    def metrics(self) -> dict[str, float]:
        """Return measurements of the last synchronized step under flat names, for `wandb.log(handle.metrics())`.

        Steps and bytes are totals since the beginning. The call never waits for a GPU.

        Returns:
            {name: number}. The page on monitoring describes each name.
        """
        return self._metrics()

    def _metrics(self, most: int = 1, seen: Step | None = None) -> dict[str, float]:
        """Return the numbers of `metrics` as means over the last steps. The arguments are those of `stats.metrics`."""
        return metrics(self.reported.measured(), most, seen)

    def watch(self, every: int = 100, to: Any = "console", *, folder: str | Path | None = None) -> Watch:
        """Report the cost of a step after every `every` steps, on rank 0, as means over the last 8 steps.

        On GPUs the parts of a step are those of the reported one alone. Results of the training do not change by a bit.

        Args:
            every: steps between two reports.
            to: "console", a rich Console or a logging.Logger, for a line of text; a run of wandb or a SummaryWriter
                of TensorBoard, for numbers; or a function of (metrics, step), which must not communicate.
            folder: the folder in which rank 0 keeps a file per rank for `gradwire top`. All ranks pass it.

        Returns:
            The watch. Reports end when you close it, or the handle.

        Raises:
            ValueError: an argument is out of range.
            TypeError: `to` is of another kind.
        """
        from .watching.watch import watch  # what reports is seldom asked for, and has six files

        return watch(self, every, to, folder)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals after a change of the loss scale. With `scaler=` or `follow`, gradwire calls it for you.

        Call it after `scaler.update()`: `if (new := scaler.get_scale()) != old: handle.rescale(new / old)`.

        Args:
            factor: the new loss scale over the old one.

        Raises:
            ValueError: the factor is not finite or not above 0.
            RuntimeError: the handle follows a scaler, or a state was loaded and no backward has run since.
        """
        if self._loss_scale is not None:
            raise RuntimeError("the handle follows a scaler by itself: leave rescale() out, or the scaler of attach()")
        if not 0 < factor < math.inf:
            raise ValueError(f"the factor is the new loss scale over the old one, above 0 and finite; got {factor}")
        self.averager.between_steps(lambda: self._rescale(factor))

    def _rescale(self, factor: float) -> None:
        self.averager.memory.rescale(factor)

    def follow(self, scaler: Scaler) -> None:
        """Rescale the residuals whenever GradScaler changes its loss scale.

        It reads the scale once per step, before a forward. On CUDA the host waits for it, as it does in `scaler.step()`.

        Args:
            scaler: a torch.amp.GradScaler.

        Raises:
            RuntimeError: the other handle of hybrid sharding follows one.
        """
        if self.averager.steps.scaler is not self._loss_scale:
            raise RuntimeError(
                "the other handle of this model follows a GradScaler, for both: call follow() of one alone"
            )
        self._loss_scale = LossScale(scaler, self._rescale, self._loss_scale)
        self.averager.steps.scaler = self._loss_scale

    def _catch_up(self) -> None:
        """Bring the residuals to the scale that a scaler has now: it is saved with that, and loaded ones have no other."""
        if self._loss_scale is not None:
            self.averager.between_steps(self._loss_scale.catch_up)

    def forward_begins(self) -> None:
        """Read the scale of a scaler, if the handle follows one: at the first bucket a GPU would be behind."""
        if self._loss_scale is not None and torch.is_grad_enabled():
            self._loss_scale.read_ahead()

    def on_average(self, function: OnAverage | None) -> None:
        """Show a function the averages of each bucket before they become gradients; it may change them in place.

        It comes after compression, whose residuals it does not touch, and before all that you do with gradients:
        unscaling, clipping, the optimizer. Gradients are multiplied by the loss scale then; those that are not finite are
        shown, too. Buckets come one at a time, in no fixed order, perhaps on another thread, and on a GPU on a stream of
        gradwire's. All ranks see the same numbers, so what the function makes of these alone stays the same on all ranks.
        It must not communicate.

        Args:
            function: a function of {parameter name: average}, or None for no function any more. It replaces the one
                before. An average has the parameter's shape; a sparse gradient's is sparse; of a parameter that
                `overlap()` sends in slices, each slice has a flat part. With FSDP2, it is this rank's shard, with
                zeros where shards are padded.

        Raises:
            ValueError: torch averages over replicas afterwards, in hybrid sharding without `replicas=`.
        """
        self.averager.between_steps(lambda: self._show(function))

    def _show(self, function: OnAverage | None) -> None:
        self.averager.shown.function = function

    def discard_step(self) -> None:
        """Forget the gradients of the last synchronized backward, so that error feedback does not carry them over.

        All ranks call it, before the next backward, swap, rescaling or load. The step still counts.

        Raises:
            RuntimeError: there is no such step.
        """
        self.averager.between_steps(self._discard)

    def _discard(self) -> None:
        self.averager.memory.discard_step()

    def __repr__(self) -> str:
        name, what = type(self).__name__, self._what() + ", closed" * self.closed
        try:
            ranks = self.reported.engines.ranks
        except RuntimeError:
            return f"<{name}: {what}, no process group yet>"
        measured, numbers = self.reported.measured(), self._metrics()
        parts = [what, f"rank {ranks.rank} of {ranks.world_size}"]
        parts += [f"{numbers['steps']} steps, {numbers['steps_here']} of them here"]
        parts += (
            [f"{numbers['ratio']:.1f}x fewer bytes in the last"] if "ratio" in numbers and numbers["sent_bytes"] else []
        )
        parts += [f"{numbers['replica_ratio']:.1f}x between replicas"] if "replica_ratio" in numbers else []
        parts += [] if measured.warm_up is None else [str(measured.warm_up)]
        return f"<{name}: {', '.join(parts)}>"
