"""`local = LocalSteps(model, optimizer, every=64)`: what the user holds."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...compress import Optimizers, Spec, compressor, specification
from ...compress.builder.spelling import whole_number
from ...ddp_core.averaging.same_kernels import varies_with_threads
from ...ddp_core.transport.protocol import Decorator
from ...ddp_core.transport.rank_messages import checksum
from ..internet.client import Rendezvous, TrainingEnded
from ..model_kinds import sharded_modules
from . import arguments, saved
from .arguments import rounds_of
from .buffers import Buffers
from .fragment import Fragment
from .inside import inside_of, show_shards
from .outer import outer, suited
from .reports import RoundStats
from .unfrozen import stray_message, strays

logger = logging.getLogger(__name__)
SLOW = 3  # rounds in a row to which a slow site gave nothing


class LocalSteps:
    """Local SGD, DiLoCo: each site trains alone, and an outer optimizer applies the average of the sites' changes.

    Make it after the optimizer, and leave the training loop as it is: the optimizer's `step()` counts (of a list, the last
    one's). Sources: SlowMo (Wang et al. 2019), DiLoCo (Douillard et al. 2023), Streaming DiLoCo (Douillard et al. 2025).

    All sites start with the first site's model. Frozen parameters must be the same at all sites. A parameter that one
    site unfreezes joins the next round at all sites. The optimizer's state stays at its site. CPU memory has two more copies
    of the model in float32, three of a part while it is averaged, and the compressor's state.

    A site may have several ranks, with a model of FSDP2, `replicate` or (with `at`) DDP among them. Then equal ranks of
    the sites average their shards, or equal parts of the whole model, and all ranks of a site call the same methods.

    Args:
        model: the model, bare, wrapped in DDP, or of FSDP2 or `replicate` on a mesh of one dimension.
        optimizer: the optimizer of the model, or a list.
        every: steps between two averages of a parameter.
        every_seconds: seconds between two averages of a parameter, in place of `every`, where sites compute at different
            speeds: each makes as many steps as it can. `every` counts until a site knows its speed.
        outer: the outer optimizer: "average" (of models), "diloco", "muloco", "slowmo", or values such as
            "nesterov:lr=0.7,momentum=0.9". By default "muloco" where Muon trains the matrices, else "average".
        compressor: the compressor of the changes. See `gradwire.compressor`.
        fragments: the number of parts in which the model is averaged, one part every `every // fragments` steps.
        overlap: True applies a part's average `delay` steps later, with the next part; local changes since then stay.
            Buffers keep each site's values then, until `synchronize` or `finish` averages them.
        at: the meeting point of sites that may join and leave. By default all ranks of `process_group` take part.
        process_group: the ranks that take part; by default the default group. Of sites with several ranks one of each.
        timeout: limit of each wait among ranks; by default that of the process group.
        transport: a function that wraps each transport, for example in an emulated link.
        outliers: what becomes of a change whose norm is more than 3 times the median of the others', with three sites or
            more: "keep", "clip" (to the median) or "drop". Both limit weights and changes of buffers, too.
        weight: the weight of this site's changes in the average, such as its batch size where sites have different ones.

    Attributes:
        weight: as above; a new value counts from the next round on.
        round: the number of averages that this site has applied, the same at all sites. End training by it if sites
            join and leave.

    Raises:
        ValueError: an option is out of range, or sites are set up differently.
        RuntimeError: a round failed, which `optimizer.step()` raises, too; or the model has LocalSteps that have not ended.
    """

    closed = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        every: int = 64,
        outer: str | None = None,
        compressor: Spec = "int4",
        fragments: int = 4,
        overlap: bool = True,
        at: Rendezvous | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        transport: Decorator | None = None,
        outliers: str = "keep",
        weight: float = 1.0,
        every_seconds: float | None = None,
    ) -> None:
        arguments.check(model, optimizer, at)
        inner = [arguments.inner(each) for each in arguments.listed(optimizer)]
        outer = suited(inner) if outer is None else outer
        self.every = whole_number(every, "every is a whole number from 1 on")
        fragments = whole_number(fragments, f"fragments is a whole number from 1 to every, {every}", most=self.every)
        self.overlap, self.steps, self.every_seconds = overlap, 0, arguments.seconds(every_seconds)
        self.round, self._own_round, self.weight = 0, 0, weight
        self.history: list[RoundStats] = []
        self.waited, self._sent_bytes = 0.0, 0.0
        sites = at or arguments.ranks_of(process_group, timeout)
        self._module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._buffers = Buffers(self._module)
        self._sharded = sharded_modules(self._module)
        show_shards(self._sharded)
        self._inside = inside_of(model, self._module, sites)
        self._rounds = rounds_of(
            self._module, self._inside, self._buffers.flat(), fragments, outer, compressor, sites, transport, outliers
        )
        self._parts = self._rounds.fragments
        self.spacing = self._due = self.every // len(self._parts)  # steps between turns, and those until the next one
        self._paced: tuple[float, int] | None = None  # the time and the steps after the last turn, or a load
        self._changed: set[int] = set()  # numbers of fragments that other ranks of the site lack
        self._setup = self._described(model, outer, compressor, outliers)
        self._missed = self._missed_in_a_row = 0  # rounds to which this site gave nothing
        self._flight: Future[RoundStats] | None = None  # the round on its way, until training has taken it up
        self._hung_at: int | None = None  # what had moved when it did not end in time: nobody waits until more has
        self._reset_due = False  # a round brought another model, which the next turn takes over
        self._warned: set[str] = set()  # names of parameters that a warning has named
        self._lock = threading.RLock()  # held at a turn, and while a thread saves or loads
        dtypes = {part.layout.dtype for part in self._parts}
        varies = varies_with_threads(self._rounds.compressor, self._rounds.operations, dtypes)
        self._rounds.sites.join(self._setup, self._rounds.operations, varies_with_threads=varies)
        self._start()
        self._hooks = [each.register_step_pre_hook(self._stepping) for each in inner]
        self._hooks.append(inner[-1].register_step_post_hook(self._stepped))
        arguments.of_models[id(self._module)] = self

    def _described(self, model: nn.Module, specified: str, spec: Spec, outliers: str) -> str:
        part, here = self._inside.part, self._inside
        frozen = [part(parameter) for parameter in model.parameters() if not parameter.requires_grad]
        shapes = [each for part in self._parts for each in part.whole.items()]
        trained = f"{len(shapes)} parameters {saved.digest(shapes)}"
        spaced = f"every={self.every}" if self.every_seconds is None else f"every_seconds={self.every_seconds:g}"
        options = f"{spaced}, overlap={self.overlap}, {outer(specified)}, outliers={outliers!r}"
        parts = f"{len(self._parts)} fragments of {trained}, and {len(frozen)} frozen ones {checksum(frozen)}"
        place = f", rank {here.rank} of {here.size} of a site" if here.size > 1 else ""
        return f"{options}, compressor={specification(compressor(spec))!r}, {parts}{place}"

    def _start(self) -> None:
        """Take over the model of those that train already, or of the first site."""
        try:
            self._begin(None)
            self._settle()
            self._agree()
        except BaseException:  # Ctrl-C, too: the interpreter's end would wait for the thread that waits for sites
            self._rounds.abandon()
            raise

    @property
    def delay(self) -> int:
        """Steps from computing a change to applying its average."""
        return self.spacing if self.overlap else 0

    def _stepping(self, *_: Any) -> None:
        """Keep what parameters are that the user has unfrozen: the optimizer is about to change them."""
        if any(part.unnoted() for part in self._parts):
            with self._lock:
                for part in self._parts:
                    part.note()

    def _stepped(self, *_: Any) -> None:
        """The optimizer has made a step."""
        if self.steps + 1 < self._due:
            self.steps += 1
            return
        with self._lock:
            self.steps += 1
            spacing = self._next_spacing()
            self._settle()
            self._begin(self._parts[self._rounds.turn])
            if not self.overlap:
                self._settle()
            self._agree(spacing)

    def _next_spacing(self) -> int:
        """Return the steps until the next turn: by the seconds of a step since the last one, if `every_seconds` is given."""
        if self.every_seconds is None or self._paced is None:
            return self.spacing
        began, before = self._paced
        seconds = (time.perf_counter() - began) / (self.steps - before)
        return max(1, round(self.every_seconds / len(self._parts) / seconds))

    @torch.no_grad()
    def _agree(self, spacing: int | None = None) -> None:
        """Give all ranks of this site the same round, next turn and whole parameters. All of them call it."""
        changed = [index in self._changed for index in range(len(self._parts))]
        rows = self._inside.tell([self._own_round, spacing or self.spacing, *changed])
        self.round, self.spacing = (min(column) for column in list(zip(*rows, strict=True))[:2])
        parts = [part for index, part in enumerate(self._parts) if any(row[2 + index] for row in rows)]
        self._inside.share([each for part in parts for each in part.known])
        self._changed.clear()
        self._set_due()

    def _set_due(self) -> None:
        begun = self.steps if self.every_seconds is not None else self.steps // self.spacing * self.spacing
        self._due, self._paced = begun + self.spacing, (time.perf_counter(), self.steps)

    @torch.no_grad()
    def _begin(self, part: Fragment | None) -> None:
        show_shards(self._sharded)
        self._stepping()
        if names := [name for name in strays(self._module, self._parts) if name not in self._warned]:
            self._warned.update(names)
            warnings.warn(stray_message(names), stacklevel=2)
        self._flight = self._rounds.begin(None if part is None else part.capture(), self._buffers.flat(), self.weight)

    @torch.no_grad()
    def _settle(self) -> None:
        """Wait for the round that is on its way, and bring what it has changed into the model."""
        self._land()
        show_shards(self._sharded)
        if self._reset_due:
            return self._reset()
        for index, part in enumerate(self._parts):
            if part.captured is not None:
                part.follow()
                self._changed.add(index)
                if part is self._parts[-1] and not self.overlap:  # else forwards have changed them since they left
                    self._buffers.take(self._rounds.buffers)

    def _arrived(self) -> RoundStats | None:
        """Wait until the round on its way has come to its end, once; None where there is none."""
        while self._flight is not None:
            moved, patience = self._rounds.moved, self._rounds.sites.patience
            try:
                return self._flight.result(0 if self._hung_at == moved else patience)
            except WaitTimeout as error:
                if moved == self._rounds.moved:  # else a site takes a model over, as slowly as its line is
                    self._hung_at = moved
                    text = f"a round of LocalSteps has not ended within {patience:.0f} s: a site hangs"
                    raise RuntimeError(text) from error
        return None

    def _land(self, *, counts: bool = True) -> None:
        """Wait for the round on its way, and take up what it tells. `counts`: False where no site gives a difference."""
        began = time.perf_counter()
        try:
            stats = self._arrived()
        finally:
            if self._flight is not None and self._flight.done():  # else Ctrl-C ended the wait, and a save still waits
                self._let_go(self._flight)
        if stats is None:
            return
        self.waited += time.perf_counter() - began
        self.history.append(stats)
        self._sent_bytes += stats.sent_bytes
        self._own_round = stats.round
        if counts:
            self._count_missed(stats)
        self._reset_due = self._reset_due or stats.replaced

    def _let_go(self, ended: Future[RoundStats]) -> None:
        """Forget a round that has ended. One that failed has no average: the next difference has the same changes again."""
        self._flight, self._hung_at = None, None
        if ended.exception() is not None:
            self._reset_due = self._reset_due or self._rounds.took_over
            for part in self._parts:
                part.captured = None

    def _count_missed(self, stats: RoundStats) -> None:
        """Warn of a round to which this site gave nothing, and of a site that never gives anything."""
        if not stats.replaced or not stats.round:
            self._missed_in_a_row = 0
            return
        self._missed, self._missed_in_a_row = self._missed + 1, self._missed_in_a_row + 1
        logger.warning("this site was late or its difference did not count; it continues with the others' model")
        if self._missed_in_a_row == SLOW:
            warnings.warn(
                f"this site has given nothing to the last {SLOW} rounds: its steps are wasted. If it is slower than the "
                "others, give it smaller batches, or raise limit= of the Rendezvous at all sites",
                stacklevel=2,
            )

    def _reset(self) -> None:
        """Take what all sites have in common for the model."""
        self._reset_due = False
        show_shards(self._sharded)
        for part in self._parts:
            part.reset()
        self._changed.update(range(len(self._parts)))
        self._buffers.take(self._rounds.buffers)

    def metrics(self) -> dict[str, float]:
        """Return measurements of the last round, and totals, under flat names, for `wandb.log(local.metrics())`."""
        found = {"steps": self.steps, "round": self.round, "waited_seconds": self.waited, "missed_rounds": self._missed}
        if self.history:
            last = self.history[-1]
            found |= {"sites": last.sites, "round_seconds": last.seconds, "sent_bytes": last.sent_bytes}
            found["total_sent_bytes"] = self._sent_bytes
        return found

    def __repr__(self) -> str:
        sites = f" of {self.history[-1].sites} sites" if self.history else ""
        return f"<LocalSteps: {self.steps} steps here, an average every {self.every}; round {self.round}{sites}>"

    def synchronize(self) -> None:
        """Average all of the model now, so that all sites have the same one. All sites call it after the same step.

        Raises:
            RuntimeError: the round failed, or local SGD has ended.
        """
        with self._lock:
            self._synchronize()
            self._agree()

    @torch.no_grad()
    def _synchronize(self) -> None:
        if self.closed:
            raise RuntimeError("local SGD has ended, by finish() or close(): create LocalSteps anew to average again")
        self._settle()
        left = len(self._parts)
        while left:
            before = self._rounds.joined
            self._begin(self._parts[self._rounds.turn])
            self._settle()
            left = left - 1 if self._rounds.joined == before else len(self._parts)  # once more with those that joined
        if self._rounds.differ:  # their last bits may be others
            self._rounds.lineage = self._rounds.digest()
            self._begin(None)
            self._land(counts=False)
        self._reset()

    def finish(self) -> None:
        """Average all of the model, so that all sites have the same one, and end local SGD.

        Raises:
            RuntimeError: the round failed, or local SGD has ended.
        """
        with self._lock, torch.no_grad():
            try:
                self._synchronize()
                self._rounds.sites.end(self._own_round)
            except TrainingEnded as ended:
                if ended.round != self._rounds.round:
                    raise
                self._reset()  # this site was in the last round of the others: what they have now is here, too
            self._agree()
        self.close()

    def close(self) -> None:
        """End local SGD without averaging: the sites' models differ. It does not wait for a round that hangs."""
        self.closed = True
        for hook in self._hooks:
            hook.remove()
        self._rounds.abandon() if self._hung_at == self._rounds.moved else self._rounds.close()

    def abandon(self) -> None:
        """End local SGD as `close` does, and wait for no round: that on its way fails."""
        self._rounds.abandon()
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state for a checkpoint, to be saved with its model and optimizer.

        It waits for the round on its way. Any thread may call it; training does not change.
        """
        with self._lock:
            stats = self._arrived()
            reset_due = self._reset_due or (stats is not None and stats.replaced)
            return saved.state_of(self._setup, self.steps, self._rounds, self._inside, reset_due=reset_due)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a saved state, loaded after the model. A state from before the sites' round leaves their model.

        Args:
            state: this rank's state; or a list with the states of all sites, to continue on another number of sites.
                From a list, each site takes the first one's common model, without later local changes, and the mean
                of all residuals. The list has the states of all ranks where sites have several: their number may change.

        Raises:
            ValueError: the state does not fit. Nothing changes then.
        """
        with self._lock, torch.no_grad():
            self._land()
            found = saved.load(state, self._setup, self._rounds, self._inside, fresh=not self.steps)
            self.steps, self._reset_due, ahead = found
            self.round = self._own_round = self._rounds.round
            self._set_due()
            if ahead or not isinstance(state, Mapping):
                self._reset()
            if not isinstance(state, Mapping):
                self._agree()
