"""The memory of a compressor for a whole model: bucket by bucket, by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...compress import specification
from ...compress.protocol.compressor import Compressor, traits_of
from ...compress.protocol.layout import Layout
from ...compress.protocol.requests import Program
from ...compress.state.shares import ranks_given
from ...compress.state.tree import Leaves
from ...kernels import all_finite
from ..buckets.grad_bucket import as_real
from ..buckets.sparse import sparse_mean
from .axis_orders import Move, moved
from .bucket_memory import CARRIED_OVER, BucketMemory, DeviceFlag
from .sliced_memory import SlicedMemory, may_be_cut
from .step_memory import StepMemory

Orders: TypeAlias = Mapping[str, Sequence[int]]  # of each parameter's axes in memory
NO_ORDERS: Orders = MappingProxyType({})


def _check_partial(compressor: Compressor, partial: bool) -> None:
    if partial and traits_of(compressor).needs_all_parameters:
        raise ValueError(
            f"{specification(compressor)} needs the gradients of all parameters in every step, and with "
            f"find_unused_parameters=True some may be missing: leave out momentum=, or set it to False"
        )


@dataclass(frozen=True)
class Unclaimed:
    """The saved fields of a parameter that no bucket holds: it was loaded, or its bucket is gone. A new bucket claims it.

    `compressor`: whose fields they are, also after a swap; None for a gradient to carry over. `layout`: the parameter's
    alone; None for a loaded one, whose fields only a bucket can read. `ranks_per_host`: of a loaded one, as in `Snapshot`.
    """

    fields: Mapping[str, Tensor]
    compressor: Compressor | None = None
    layout: Layout | None = None
    ranks_per_host: int | None = None

    def memory(self, step: int) -> BucketMemory:
        """Return a memory of the parameter alone, whose layout is known."""
        assert self.compressor is not None
        assert self.layout is not None
        memory = BucketMemory(self.compressor, self.layout, step)
        memory.load({self.layout.names[0]: self.fields})
        return memory

    def rescaled(self, factor: float, step: int) -> Unclaimed:
        """Return it with what is held back multiplied; without fields if that is nothing.

        Raises RuntimeError for fields that only a bucket can read.
        """
        if self.layout is not None:
            memory = self.memory(step)
            memory.rescale(factor)
            return replace(self, fields=memory.save().get(self.layout.names[0], {}))
        if self.fields.keys() != {CARRIED_OVER}:
            raise RuntimeError("a loaded state can be rescaled after the next backward, not before it")
        return replace(self, fields={CARRIED_OVER: self.fields[CARRIED_OVER] * factor})


@dataclass(frozen=True)
class Snapshot:
    """The memory of a model after `step` steps; later ones do not change it. `unclaimed`: fields of `Unclaimed` parameters.

    `ranks_per_host`: where a compressor of two levels took them into account. `orders`: see `ModelMemory`.
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
        """{"step", "buckets": names of each bucket in order, "parameters": {name: {field: tensor}}, "orders"}; copies."""
        entries = {name: dict(fields) for name, fields in self.unclaimed.items()}
        for bucket in self.live:
            entries.update(bucket.save())
        hosts = {} if self.ranks_per_host is None else {"ranks_per_host": self.ranks_per_host}
        state = {"step": self.step, "buckets": list(map(list, self.buckets)), "parameters": entries, **hosts}
        return {**state, "orders": {name: list(order) for name, order in self.orders.items()}}


class ModelMemory(StepMemory):
    """The memory of all buckets of a model. It follows parameters by name when buckets change. `undo`: see `StepMemory`.

    `orders`: of each parameter that anything is remembered of, how its axes lay in memory then, that of the largest stride
    first. An axis of one element has no place among them. A parameter that is missing lay row by row.
    """

    def __init__(self, compressor: Compressor, *, partial: bool = False, undo: bool = True) -> None:
        _check_partial(compressor, partial)
        super().__init__(undo)
        self._choose(compressor)
        self.partial = partial
        self._unclaimed_buckets: list[tuple[str, ...]] = []  # of a loaded state, or before a swap; not met yet
        self._swapped_buckets: set[tuple[str, ...]] = set()  # buckets before a swap, which cut no new ones
        self._live: dict[tuple[str, ...], SlicedMemory] = {}
        self.carrying = False  # whether any rank may owe something outside a compressor's state; the same on all ranks
        self._names_before: list[tuple[str, ...]] = []  # of the buckets when the step that is under way began
        self._stateful: bool | None = None  # whether any bucket is; None until a step has met them all
        self._others_finite: list[DeviceFlag] = []  # of the step that is under way: of what is in no bucket
        self._unclaimed: dict[str, Unclaimed] = {}
        self.orders: dict[str, Sequence[int]] = {}

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
        return self._plain and not self._still_carrying()

    @property
    def remembers(self) -> bool:
        """True if a step may keep a part of its gradients, or sends what was kept; the same on all ranks."""
        return not self._plain or (self.partial and self._still_carrying())

    @property
    def may_be_cut(self) -> bool:
        """True if buckets may be cut into slices anywhere; the same on all ranks."""
        return not self.partial and may_be_cut(self.compressor)

    def _choose(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._plain = traits_of(compressor).averages

    def _still_carrying(self) -> bool:
        """Return True if any rank may carry something over once the last step is committed."""
        if not self.carrying or self._unclaimed or not self._live:
            return self.carrying
        # reversed: within a step the last one has not
        came = all(each.brought_out for bucket in reversed(self._live.values()) for each in reversed(bucket.slices))
        return not (came and self._finite())

    def _finite(self) -> bool:
        """Return True if the averages of the last step were finite, and nobody has discarded it."""
        if self._discarded:
            return False
        return all(map(bool, self._others_finite)) and all(
            each.finite() for bucket in self._live.values() for each in bucket.slices
        )

    def get(self, layout: Layout, cuts: Sequence[Layout] = (), orders: Orders = NO_ORDERS) -> SlicedMemory | None:
        """The bucket of this layout, if it is known; `cuts`: of its slices, where it is sent in some."""
        bucket = self._live.get(layout.names)
        if bucket is None or (bucket.layout, bucket.cuts) != (layout, tuple(cuts)) or any(self._moves(orders)):
            return None
        return bucket

    def _moves(self, orders: Orders) -> Iterator[str]:
        """The parameters whose axes lie in another order than what is remembered of them."""
        return (name for name, order in orders.items() if list(self.orders.get(name, sorted(order))) != list(order))

    def expect(self, names: Iterable[str], ranks_per_host: int = 1) -> None:
        """Raise ValueError where a state was loaded, and none of its parameters has one of these names, or hosts differ."""
        hosts = {each.ranks_per_host for each in self._unclaimed.values() if each.compressor == self.compressor}
        if other := hosts - {None, ranks_per_host}:
            raise ValueError(
                f"the state was saved on hosts of {other.pop()} ranks, here they have {ranks_per_host}: load the states of "
                f"all ranks with load_state_dict(states, resize=True)"
            )
        loaded = {*self._unclaimed, *(name for bucket in self._unclaimed_buckets for name in bucket)}
        if loaded and loaded.isdisjoint(names):
            raise ValueError(
                f"the loaded state is of parameters such as {min(loaded)!r}, the model has others, such as {min(names)!r}: "
                f"call handle.bind(model), then load the state again"
            )

    def add(self, layout: Layout, cuts: Sequence[Layout] = (), orders: Orders = NO_ORDERS) -> SlicedMemory:
        """A new bucket; the state of its parameters moves in from the buckets that held them.

        `orders`: of the axes of its parameters in memory, as in `orders` of this memory.
        """
        members = set(layout.names)
        for names in [names for names in self._live if members.intersection(names)]:
            self._release(self._live.pop(names))
        self._follow(layout, orders)
        options = {"partial": self.partial, "carrying": self.carrying, "undo": self.undo}
        bucket = SlicedMemory(self.compressor, layout, cuts, self.step, **options)
        self._claim(bucket)
        self._live[layout.names] = bucket
        self._stateful = None
        return bucket

    def _follow(self, layout: Layout, orders: Orders) -> None:
        """Move what is remembered of a new bucket's parameters to where their elements lie now."""
        for name in list(self._moves(orders)):
            each, before = self._unclaimed.get(name), self.orders.get(name, sorted(orders[name]))
            if each is None or sorted(before) != sorted(orders[name]):
                continue
            alone = layout.select((layout.names.index(name),))
            alone = replace(alone, ranks=replace(alone.ranks, per_host=each.ranks_per_host or alone.ranks.per_host))
            move = Move.of(alone.shapes[0], before, orders[name])
            fields = moved(each.fields, move, each.compressor or self.compressor, alone, self.step)
            self._unclaimed[name] = replace(each, fields=fields, layout=None if each.layout is None else alone)
            self.carrying = True  # on all ranks, though not all of them serve a part of this parameter
        self.orders.update(orders)

    def _release(self, bucket: SlicedMemory) -> None:
        """Keep the state of a bucket that is no more."""
        saved, layout = bucket.save(), bucket.layout
        for place, name in enumerate(layout.names):
            if name in saved:
                self._unclaimed[name] = Unclaimed(saved[name], self.compressor, layout.select((place,)))

    def _claim(self, bucket: SlicedMemory) -> None:
        """Move the state of its parameters into a new bucket. From a compressor before a swap it takes what is held back."""
        mine = {name: self._unclaimed.pop(name) for name in bucket.layout.names if name in self._unclaimed}
        swapped = {name: each for name, each in mine.items() if each.compressor not in (None, self.compressor)}
        bucket.load({name: each.fields for name, each in mine.items() if name not in swapped})
        if swapped:
            one = next(iter(swapped.values()))  # they are of one load
            assert one.compressor is not None
            ranks = replace(bucket.layout.ranks, per_host=one.ranks_per_host or 1)
            former = BucketMemory(one.compressor, replace(bucket.layout, ranks=ranks), self.step)
            former.load({name: each.fields for name, each in swapped.items()})
            bucket.carry_over(former.held_back())

    def arrange(self, order: Iterable[tuple[str, ...]]) -> None:
        """Have the buckets in this order where they are listed; the first mention counts."""
        self._live = {names: self._live[names] for names in (*order, *self._live) if names in self._live}

    @property
    def watched(self) -> bool:
        """True if any bucket has something to undo, or may have, where some buckets are not known yet."""
        return self.carrying or not self._plain if self._stateful is None else self._stateful

    def reduce_sparse(self, world_size: int, gradient: Tensor, *, watched: bool) -> Program[Tensor]:
        """The mean over ranks of a sparse gradient, which no compressor sees. `watched` as for a bucket."""
        average = yield from sparse_mean(gradient, world_size)
        if watched:
            self.note_finite(all_finite(as_real(average.values())))
        return average

    @property
    def finite_here(self) -> Tensor | None:
        """True on the device if all averages of the step that is under way were finite; None if no bucket is watched."""
        flags = [flag for _, each in self.live if (flag := each.finite_here) is not None]
        return torch.stack(flags).all() if flags else None

    def note_finite(self, finite: Tensor) -> None:
        """Have the step that is under way not count unless this flag is True, beside those of its buckets."""
        if self.watched:
            self._others_finite.append(DeviceFlag(finite))

    def split(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """The buckets of a loaded state that together hold exactly these parameters; else all of them as one."""
        wanted = tuple(names)
        loaded = [saved for saved in self._unclaimed_buckets if saved not in self._swapped_buckets]
        inside = [saved for saved in loaded if set(saved).issubset(wanted)]
        self._unclaimed_buckets = [saved for saved in self._unclaimed_buckets if not set(saved).intersection(wanted)]
        exact = sum(map(len, inside)) == len(wanted)
        return inside if exact else [wanted]

    @property
    def counts(self) -> bool:
        """True if the last step is remembered, and can still be undone."""
        return self.watched and not self.committed and self._finite()

    def begin_step(self) -> int:
        """Commit the step before. Return the number of the one that begins, those before a checkpoint counted."""
        self.commit()
        self.step, self.committed = self.step + 1, False
        return self.step

    def commit(self) -> None:
        """Keep the step before, or undo it everywhere if its average was not finite anywhere, or it was discarded."""
        self.committed = True
        if self._stateful is False and not self.carrying:
            self._names_before, self._discarded = [*self._live, *self._unclaimed_buckets], False
            return
        self.carrying, keep, self._discarded = self._still_carrying(), self._finite(), False
        self._others_finite = []
        self._names_before = [*self._live, *self._unclaimed_buckets]
        live = self.live
        lost = [each.end_step(keep, self.carrying) for _, each in live]
        if any(lost):
            self.note_loss()
        self._stateful = any(each.stateful for _, each in live) if live else None

    def replace(self, compressor: Compressor) -> None:
        """Go on with another compressor; what was held back is carried to the next average."""
        _check_partial(compressor, self.partial)
        self.commit()
        owed = [each.memory(self.step).held_back() for each in self._unclaimed.values() if each.layout is not None]
        owed += [bucket.held_back() for bucket in self._live.values()]
        self._unclaimed |= {name: Unclaimed({CARRIED_OVER: held[name]}) for held in owed for name in held}
        # the residuals of a loaded state may all be on another rank of the host: then this rank carries, too
        may_owe = bool(self._unclaimed_buckets) and (self.carrying or not self._plain)
        self._choose(compressor)
        self._unclaimed_buckets = [*self._live, *self._unclaimed_buckets]
        self._swapped_buckets.update(self._live)
        self._live, self._stateful = {}, None
        self.carrying = may_owe or bool(self._unclaimed)

    def rescale(self, factor: float) -> None:
        """Multiply what all buckets hold back. Raises RuntimeError for a loaded state that no step has taken up yet."""
        self.commit()
        rescaled = {name: each.rescaled(factor, self.step) for name, each in self._unclaimed.items()}
        self._unclaimed = {name: each for name, each in rescaled.items() if each.fields}
        for _, each in self.live:
            each.rescale(factor)

    def snapshot(self, *, under_way: bool = False) -> Snapshot:
        """The memory after the last step, or before the one that is `under_way`; copies pointers only.

        Raises RuntimeError for a state that was loaded, then swapped, and that no step has taken up.
        """
        if any(each.compressor not in (None, self.compressor) for each in self._unclaimed.values()):
            raise RuntimeError(
                "a state that was loaded, then swapped, can be saved after the next backward, not before it"
            )
        if under_way:
            self.note_save_within()
        carrying, keep = (self.carrying, False) if under_way else (self._still_carrying(), self._finite())
        buckets = self._names_before if under_way else [*self._live, *self._unclaimed_buckets]
        unclaimed = {name: each.fields for name, each in self._unclaimed.items()}
        undone = not (under_way or keep)
        live = [bucket.snapshot(keep=keep, undone=undone, carrying=carrying) for bucket in self._live.values()]
        on_hosts = {each.ranks_per_host for each in self._unclaimed.values() if each.ranks_per_host is not None}
        if ranks_given(self.compressor) is not None:
            on_hosts.update(bucket.layout.ranks.per_host for bucket in live)
        hosts, orders = max(on_hosts, default=None), dict(self.orders)
        return Snapshot(self.compressor, self.step - under_way, buckets, unclaimed, live, hosts, orders)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take a saved state; buckets claim their parts when they are met."""
        self.step, self.committed, self._discarded = int(saved["step"]), True, False
        self._unclaimed_buckets, self._swapped_buckets = [tuple(names) for names in saved["buckets"] if names], set()
        self._live, self._stateful = {}, None
        self._unclaimed, self.orders = {}, dict(saved.get("orders", {}))
        for name, fields in saved["parameters"].items():
            detached = {field: numbers.detach() for field, numbers in fields.items()}
            self._unclaimed[name] = Unclaimed(detached, self.compressor, ranks_per_host=saved.get("ranks_per_host"))
        self.carrying = any(CARRIED_OVER in each.fields for each in self._unclaimed.values())
