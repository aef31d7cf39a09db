"""Gathers the parameters of sharded modules, and sums their gradients: what FSDP2's communication calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress import AllGather, TwoShot
from ...compress.protocol.layout import Scope
from ...compress.protocol.requests import Program
from ...compress.shards.layout import ShardLayout
from ...compress.shards.reduction import ShardState, ShardSum
from ...compress.shards.requests import shards_sent_in_vain
from ...compress.shards.weights import HeldWeights, WeightGather
from ...compress.simulate import operations_of
from ..measure.stats import Measured
from ..measure.step import BucketStats, Record, Step
from ..memory.shard_memory import Key, ShardMemory, WeightMemory
from ..transport.launchers import on_launched_hosts
from ..transport.process_group import over
from ..transport.protocol import Decorator, Pending
from ..transport.rank_messages import FINITE, true_everywhere
from .plans import Route, Sent, labelled
from .same_kernels import agree_on_kernels
from .shown_averages import parts_of_row
from .steps import SteppedAverager, Steps

IN_FIRST: tuple[Scope, ...] = ("host", "across")  # rounds of sums in two levels
IN_LAST: tuple[Scope, ...] = ("across", "host")  # and of gathers


class ShardAverager(SteppedAverager):
    """The communication of a model's shards on this rank, its cost and its memory.

    `group`: the ranks that share the parameters. `steps`: those of what averages over replicas, if anything of gradwire's
    does. `replica_group`: the ranks that have the same shards; None without replicas. `undo`: see `StepMemory`. All ranks
    make the same calls in the same order.
    """

    def __init__(
        self,
        reduction: ShardSum,
        weights: WeightGather,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta | None,
        decorate: Decorator | None = None,
        steps: Steps | None = None,
        undo: bool = False,
        replica_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__([group], timeout, decorate, steps or Steps())
        self.device = device
        reduction, self.weights = self._placed(reduction, weights)
        self.memory: ShardMemory = ShardMemory(reduction, undo)
        self.replica_transport = None if replica_group is None else over(replica_group, device)
        self.in_use = WeightMemory()
        self.decorated = decorate is not None
        self._record_is_over = True  # what comes next belongs to the record of another step
        self._agreed = False  # since the last change
        self._beside = False  # programs of several rounds have run, since when threads or streams carry all
        self._gathers: dict[int, tuple[Route, Sent]] = {}  # by the number of the module
        self._reductions: dict[int, tuple[Route, Sent]] = {}

    def _placed(self, reduction: ShardSum, weights: WeightGather) -> tuple[ShardSum, WeightGather]:
        """Return both as they are on these hosts. A collective call where hosts are to be found.

        Raises ValueError for hosts that do not suit.
        """
        ranks, sizes = self.engines.ranks.world_size, []
        for hosts in (reduction.hosts, weights.hosts):
            sizes.append(1 if hosts is None else self.engines.placed_ranks(hosts, self.device).per_host)
        if len(set(sizes).difference([1, ranks])) > 1:
            raise ValueError(
                f"gather and reduce name hosts of {sizes[1]} and {sizes[0]} ranks: name the same ones for both"
            )
        return reduction.placed(sizes[0], ranks), weights.placed(sizes[1], ranks)

    @property
    def per_host(self) -> int:
        """The ranks of a host if anything travels in two levels, else 1."""
        return max(self.memory.reduction.per_host, self.weights.per_host)

    def gather(
        self, index: int, names: tuple[str, ...], program: Program[Tensor], out: Tensor, *, training: bool
    ) -> Pending:
        """Begin to fill `out` with the rows of all ranks, by a program of `weights`; outside of training, in no step."""
        way = self._gathers.get(index)
        if way is None or way[1].nbytes != out.nbytes:
            way = self._gathers[index] = self._route(gathers=True), Sent.of(labelled(index, names), names, out)
        if training and self._record_is_over:
            self._record()
        route, sent = way
        if training:
            return route.send(program, sent, self.step.costs, self.step.now)
        costs = list[BucketStats]()
        pending = route.send(program, sent, costs)
        self.totals.count(costs)
        return pending

    def gather_again(self, names: tuple[str, ...], rows: Tensor, out: Tensor) -> None:
        """Fill `out` with weights in use that this rank holds. Nothing is sent.

        On a GPU another stream may have waited for the gather that wrote them, as after `unshard(async_op=True)`.
        """
        self.engines.of(self.device, 0).follow_gathers()
        out.copy_(rows.view(-1))
        per_host = self.weights.per_host
        self._note(
            BucketStats(names, out.numel(), Record(), None, out.element_size(), per_host=per_host), training=True
        )

    def note_gather(self, names: tuple[str, ...], mine: Tensor, out: Tensor, *, training: bool) -> None:
        """Count what torch gathers of a module, or somebody who does it for torch."""
        ranks = out.numel() // mine.numel()
        scope = "host" if ranks == self.per_host > 1 else "all"
        record = Record([(scope, mine.nbytes, AllGather(mine).sent_bytes(ranks))])
        self._note(BucketStats(names, out.numel(), record, None, out.element_size()), training)

    def reduce(self, index: int, layout: ShardLayout, grad: Tensor, out: Tensor, scale: float) -> Pending:
        """Begin to fill `out` with `scale` times the mean over ranks of this rank's row of `grad`."""
        way, names = self._reductions.get(index), layout.whole.names
        if way is None or way[1].names != names or way[1].nbytes != grad.nbytes:
            way = self._reductions[index] = self._route(), Sent.of(labelled(index, names), names, grad)
        if self._record_is_over:
            self._record()
        route, sent = way
        with self.steps.lock:
            state = self.memory.get(index, layout)
        program = self.memory.reduction.reduce(grad, state, out, scale)
        if self.shown.function is not None and not layout.unnamed:
            program = self.shown.average_of(program, partial(parts_of_row, names, layout.shapes), names)
        return route.send(program, sent, self.step.costs, self.step.now)

    def _route(self, *, gathers: bool = False) -> Route:
        """Return the way of a module's programs, which the ranks have agreed on."""
        if not self._agreed:
            self._agree()
        on_wait = self.device.type == "cpu" and not self._beside
        per_host = (self.weights if gathers else self.memory.reduction).per_host
        return Route(self.engines.of(self.device, 0), on_wait=on_wait, lent=True, gathers=gathers, per_host=per_host)

    def _note(self, stats: BucketStats, training: bool) -> None:
        if not training:
            return self.totals.count([stats])
        if self._record_is_over:
            self._record()
        self.step.costs.append(stats)

    def _agree(self) -> None:
        """Compare with the other ranks how this one is set up."""
        engine = self.engines.of(self.device, 0)
        self.engines.agreement.barrier(engine.transport, self.engines.timeout)
        memory = self.memory
        engine.agree(f"weights as {self.weights!r} and gradients as {memory.reduction!r} at step {memory.step}")
        agree_on_kernels(self._operations(), engine.transport, self.device)
        if self.per_host > 1:
            self._beside = True
            engine.transport.arrange(self.per_host)
        sums: tuple[Scope, ...] = ("all",) if self.memory.reduction.per_host == 1 else IN_FIRST
        gathers: tuple[Scope, ...] = ("all",) if self.weights.per_host == 1 else IN_LAST
        gathers *= 2 if self.weights.differences else 1  # which exact rows may follow
        scopes = [{each for each in both if each is not None} for both in zip_longest(sums, gathers)]
        engine.prepare(len(scopes), scopes)
        self.log_advice(shards_sent_in_vain(self.weights, memory.reduction, on_launched_hosts(self.engines.ranks)))
        self._agreed = True

    def _operations(self) -> set[str]:
        """The names of the operations that shards and their gradients need."""
        reduction = self.memory.reduction
        codecs = (self.weights.codec, reduction.codec, reduction.inside)
        programs = (TwoShot(codec) for codec in codecs if codec is not None)
        return set[str]().union(*(operations_of(each, torch.float32, self.engines.ranks) for each in programs))

    def _record(self) -> None:
        """Begin the record of a step: what comes after the end of one belongs to the next."""
        self.totals.count(self.step.costs, self.step)
        self.step, self._record_is_over = Step(), False
        self.totals.begin(self.step, self.memory.step)

    def look_for_discarded(self, trained: Sequence[Tensor]) -> None:
        """Look for averages of these parameters that are thrown away, where a part of them is in residuals."""
        self.discarded.watch(trained if self.memory.reduction.feedback else ())

    def enter_step(self) -> None:
        """Take part in the step that `steps` has begun: the step before is committed."""
        if self._record_is_over:
            self._record()
        with self.steps.lock:
            self.discarded.check(lambda: self.memory.counts)
            self.step.setup = self.memory.reduction, self.weights
            self.step.number = self.memory.begin_step()
            self.engines.agreement.step += 1
            self.inside = True

    def step_is_over(self) -> None:
        """Let the weights in use stand that were gathered for the step, and judge its residuals by all of its gradients."""
        self._record_is_over = True
        self.discarded.look()  # torch has put the gradients into their places
        self.memory.end_step()
        self.in_use.end_step()

    def hear_replicas(self) -> Tensor | None:
        """Have the step count on no replica if any replica met a gradient that is not finite. A collective call.

        Returns True on the device if it counts; None where that changes nothing.
        """
        finite = self.memory.finite
        if self.replica_transport is not None and finite.everywhere is not None:
            finite.everywhere = true_everywhere(finite.everywhere, self.replica_transport, what=FINITE)
        return finite.everywhere

    def measured(self) -> Measured:
        """Return the records of the last steps. They are not timed in full: backward is torch's."""
        ended = self.step if self._record_is_over else None
        steps, ranks = self.totals.recent_and(ended), self.engines.group.size()
        begun, on_host = self.engines.agreement.step, self.engines.on_host
        return Measured(steps, self.stats(), begun, ranks, on_host=on_host, sharded=True)

    def replace(self, reduction: ShardSum, weights: WeightGather) -> None:
        """Go on with other payloads from the next step on; nothing that is held back is lost. Between steps.

        Raises ValueError, changing nothing, for hosts that do not suit, or where a rank would keep fewer residuals.
        """
        reduction, weights = self._placed(reduction, weights)
        self.memory.replace(reduction)
        self.weights = weights
        self._change()

    def loaded(self, parameters: Mapping[str, Mapping[str, Any]], *, means: bool = False) -> dict[int, ShardState]:
        """The states of modules as they were saved, or of `means` over all ranks: see `ShardMemory.loaded`."""
        with self.steps.lock:
            return self.memory.loaded(parameters, means=means)

    def load(self, states: Mapping[int, ShardState], step: int, in_use: Mapping[Key, HeldWeights]) -> None:
        """Go on from these states and weights in use, of `loaded`. Between steps."""
        self.memory.load(states, step)
        self.in_use.load(in_use)
        self._change()

    def _change(self) -> None:
        self._agreed, self.engines.agreement.due = False, True
        self._gathers, self._reductions = {}, {}
