"""The memory of a compressor for a whole model: bucket by bucket, by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...compress import specification
from ...compress.feedback.switch import Switch
from ...compress.protocol.compressor import Compressor, inside, traits_of
from ...compress.protocol.layout import Layout
from ...compress.protocol.requests import Program
from ...compress.state.shares import ranks_given
from ...compress.state.tree import Leaves
from ...kernels import all_finite
from ..buckets.grad_bucket import as_real
from ..buckets.sparse import sparse_mean
from .bucket_memory import CARRIED_OVER, BucketMemory, DeviceFlag
from .claims import NO_ORDERS, Claims, Orders
from .sliced_memory import SlicedMemory, may_be_cut
from .step_memory import StepMemory


@dataclass(frozen=True)
class Snapshot:
    """The memory of a model after `step` steps; later ones do not change it. `unclaimed`: fields of `Unclaimed` parameters.

    `ranks_per_host`: where a compressor of two levels took them into account. `orders`: see `Claims`.
    """

    compressor: Compressor
    step: int
    buckets: Sequence[tuple[str, ...]]
    unclaimed: Mapping[str, Mapping[str, Tensor]]
    live: Sequence[SlicedMemory]
    ranks_per_host: int | None = None
    orders: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """True if there may be anything to save."""
        return bool(self.step or self.unclaimed or self.live)

    def state_dict(self) -> dict[str, Any]:
        """{"step", "buckets": names of each bucket in order, "parameters": {name: {field: tensor}}, "orders"}.

        Tensors of buckets are copies; those that no bucket has claimed yet are the loaded ones.
        """
        entries = {name: dict(fields) for name, fields in self.unclaimed.items()}
        for bucket in self.live:
            entries.update(bucket.save())
        hosts = {} if self.ranks_per_host is None else {"ranks_per_host": self.ranks_per_host}
        state = {"step": self.step, "buckets": list(map(list, self.buckets)), "parameters": entries, **hosts}
        return {**state, "orders": {name: list(order) for name, order in self.orders.items()}}


class ModelMemory(StepMemory):
    """The memory of all buckets of a model. It follows parameters by name when buckets change.

    `partial`: backwards may leave parameters out. `undo`: see `StepMemory`. `claims`: the state that no bucket holds. All
    ranks answer the questions about steps alike:

    | name | question |
    | --- | --- |
    | `averages` | May gradients come divided by the ranks, as nothing is encoded, added or kept? |
    | `remembers` | May a step keep a part of its gradients or, with `partial`, send what was kept? |
    | `watched` | Does a step have anything to undo, so that it must know whether averages are finite? |
    | `any_rank_owes` | May any rank owe gradients outside a compressor's state, since a swap or a load? |
    | `_stateful` | Does any bucket have something to undo? None until a step has met them all |
    """

    def __init__(self, compressor: Compressor, *, partial: bool = False, undo: bool = True) -> None:
        self.partial = partial
        self.refuse(compressor)
        super().__init__(undo)
        self._choose(compressor)
        self.claims = Claims()
        self._live: dict[tuple[str, ...], SlicedMemory] = {}
        self.any_rank_owes = False
        self._names_before: list[tuple[str, ...]] = []  # of the buckets when the step that is under way began
        self._stateful: bool | None = None
        self._others_finite: list[DeviceFlag] = []  # of the step that is under way: of what is in no bucket

    @property
    def live(self) -> list[tuple[tuple[str, ...], BucketMemory]]:
        """The memory of each slice of each bucket, and the names in the bucket."""
        return [(names, each) for names, bucket in self._live.items() for each in bucket.slices]

    def states(self) -> list[Leaves]:
        """Return the leaves of each slice of each bucket."""
        return [each.leaves for _, each in self.live]

    @property
    def averages(self) -> bool:
        """True if the compressor only averages and no rank carries anything over: gradients may then come divided."""
        return self._plain and not self._any_rank_still_owes()

    @property
    def remembers(self) -> bool:
        """True if a step may keep a part of its gradients or, with `partial`, sends what was kept."""
        return not self._plain or (self.partial and self._any_rank_still_owes())

    @property
    def may_be_cut(self) -> bool:
        """True if buckets may be cut into slices anywhere; the same on all ranks."""
        return not self.partial and may_be_cut(self.compressor)

    def _choose(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._plain = traits_of(compressor).averages
        switches = (each for each in inside(compressor) if isinstance(each, Switch))
        self.starts = sorted({start for each in switches for start in each.starts})  # steps at which a stage begins

    def _any_rank_still_owes(self) -> bool:
        """Return True if any rank may carry something over once the last step is committed."""
        if not self.any_rank_owes or self.claims.parameters or not self._live:
            return self.any_rank_owes
        # the last bucket first: while a step is under way it has no average, and no flag of a GPU is waited for
        came = all(each.brought_out for bucket in reversed(self._live.values()) for each in reversed(bucket.slices))
        return not (came and self._finite())

    def _finite(self) -> bool:
        """Return True if the averages of the last step were finite, and nobody has discarded it."""
        if self._discarded:
            return False
        return all(map(bool, self._others_finite)) and all(
            each.finite is None or each.finite for bucket in self._live.values() for each in bucket.slices
        )

    def get(self, layout: Layout, cuts: Sequence[Layout] = (), orders: Orders = NO_ORDERS) -> SlicedMemory | None:
        """The bucket of this layout, if it is known; `cuts`: of its slices, where it is sent in some."""
        bucket = self._live.get(layout.names)
        if bucket is None or (bucket.layout, bucket.cuts) != (layout, tuple(cuts)) or any(self.claims.moves(orders)):
            return None
        return bucket

    def add(self, layout: Layout, cuts: Sequence[Layout] = (), orders: Orders = NO_ORDERS) -> SlicedMemory:
        """A new bucket; the state of its parameters moves in from the buckets that held them.

        `orders`: of the axes of its parameters in memory, as in `orders` of `Claims`.
        """
        members = set(layout.names)
        for names in [names for names in self._live if members.intersection(names)]:
            self.claims.release(self._live.pop(names), self.compressor)
        if self.claims.follow(layout, orders, self.compressor, self.step):
            self.any_rank_owes = True  # on all ranks, though not all of them serve a part of these parameters
        options = {"partial": self.partial, "any_rank_owes": self.any_rank_owes, "undo": self.undo}
        bucket = SlicedMemory(self.compressor, layout, cuts, self.step, **options)
        self.claims.claim(bucket, self.compressor, self.step)
        self._live[layout.names] = bucket
        self._stateful = None
        return bucket

    def arrange(self, order: Iterable[tuple[str, ...]]) -> None:
        """Put the buckets that are listed first, in this order: saves list them so; `_any_rank_still_owes` asks the last."""
        self._live = {names: self._live[names] for names in (*order, *self._live) if names in self._live}

    @property
    def watched(self) -> bool:
        """True if any bucket has something to undo, or may have, where some buckets are not known yet."""
        if self._stateful is not None:
            return self._stateful
        return self.any_rank_owes or not self._plain

    def reduce_sparse(self, world_size: int, gradient: Tensor, *, watched: bool) -> Program[Tensor]:
        """The mean over ranks of a sparse gradient, which no compressor sees. `watched` as for a bucket."""
        average = yield from sparse_mean(gradient, world_size)
        if watched:
            self.note_finite(all_finite(as_real(average.values())))
        return average

    @property
    def finite_here(self) -> Tensor | None:
        """True on the device if the averages of watched buckets were finite in the step under way; None without any."""
        flags = [each.finite.on_device for _, each in self.live if each.finite is not None]
        return torch.stack(flags).all() if flags else None

    def note_finite(self, finite: Tensor) -> None:
        """Have the step that is under way not count unless this flag is True, beside those of its buckets."""
        if self.watched:
            self._others_finite.append(DeviceFlag(finite))

    @property
    def counts(self) -> bool:
        """True if the last step, which is not committed yet, has changed what is remembered and will be kept."""
        return self.watched and not self.committed and self._finite()

    def begin_step(self) -> int:
        """Commit the step before. Return the number of the one that begins, those before a checkpoint counted."""
        self.commit()
        self.step, self.committed = self.step + 1, False
        return self.step

    def commit(self) -> None:
        """Keep the step before, or undo all of it if any of its averages was not finite, or it was discarded."""
        self.committed = True
        if self._stateful is False and not self.any_rank_owes:  # there is nothing to undo, and no flag to wait for
            self._names_before, self._discarded = [*self._live, *self.claims.buckets], False
            return
        self.any_rank_owes, keep, self._discarded = self._any_rank_still_owes(), self._finite(), False
        self._others_finite = []
        self._names_before = [*self._live, *self.claims.buckets]
        live = self.live
        lost = [each.end_step(keep, self.any_rank_owes) for _, each in live]
        if any(lost):
            self.note_loss()
        self._stateful = any(each.stateful for _, each in live) if live else None

    def refuse(self, compressor: Compressor) -> None:
        """Raise ValueError for a compressor that does not suit this model."""
        if self.partial and traits_of(compressor).needs_all_parameters:
            raise ValueError(
                f"{specification(compressor)} needs the gradients of all parameters in every step, and with "
                "find_unused_parameters=True some may be missing: leave out momentum=, or set it to False"
            )

    def replace(self, compressor: Compressor) -> None:
        """Go on with another compressor, which was not refused; what was held back is carried to the next average."""
        self.commit()
        # a loaded state's residuals may all be on another rank of the host (compress/state/shares.py): this one carries, too
        may_owe = bool(self.claims.buckets) and (self.any_rank_owes or not self._plain)
        self.claims.swap(self._live, self.step)
        self._choose(compressor)
        self._live, self._stateful = {}, None
        self.any_rank_owes = may_owe or bool(self.claims.parameters)

    def rescale(self, factor: float) -> None:
        """Multiply what all buckets hold back. Raises RuntimeError for a loaded state that no step has taken up yet."""
        self.commit()
        self.claims.rescale(factor, self.step)
        for _, each in self.live:
            each.rescale(factor)

    def snapshot(self, *, under_way: bool = False) -> Snapshot:
        """The memory after the last step, or before the one that is `under_way`; copies pointers only.

        Raises RuntimeError for a state that was loaded, then swapped, and that no step has taken up.
        """
        if any(each.compressor not in (None, self.compressor) for each in self.claims.parameters.values()):
            raise RuntimeError(
                "a state that was loaded, then swapped, can be saved after the next backward, not before it"
            )
        if under_way:
            self.note_save_within()
        owes, keep = (self.any_rank_owes, False) if under_way else (self._any_rank_still_owes(), self._finite())
        buckets = self._names_before if under_way else [*self._live, *self.claims.buckets]
        unclaimed = {name: each.fields for name, each in self.claims.parameters.items()}
        undone = not (under_way or keep)
        live = [bucket.snapshot(keep=keep, undone=undone, any_rank_owes=owes) for bucket in self._live.values()]
        on_hosts = {each.ranks_per_host for each in self.claims.parameters.values() if each.ranks_per_host is not None}
        if ranks_given(self.compressor) is not None:
            on_hosts.update(bucket.layout.ranks.per_host for bucket in live)
        hosts, orders = max(on_hosts, default=None), dict(self.claims.orders)  # all alike: `Claims.expect` sees to it
        return Snapshot(self.compressor, self.step - under_way, buckets, unclaimed, live, hosts, orders)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take a saved state; buckets claim their parts when they are met."""
        self.step, self.committed, self._discarded = int(saved["step"]), True, False
        self.claims = Claims.of(saved, self.compressor)
        self._live, self._stateful = {}, None
        # It must be alike on all ranks. A part of a compressor's state may have lost its place on some ranks only: in new
        # buckets whose first step was undone before the save. Where gradients are only averaged, all states owe alike.
        carried = any(CARRIED_OVER in each.fields for each in self.claims.parameters.values())
        self.any_rank_owes = carried or not self._plain
