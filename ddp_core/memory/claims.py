"""State that no bucket holds: of a loaded checkpoint, or of buckets that are no more. New buckets claim it by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor

from ...compress.protocol.compressor import Compressor
from ...compress.protocol.layout import Layout
from .axis_orders import Move, moved
from .bucket_memory import CARRIED_OVER, BucketMemory
from .sliced_memory import SlicedMemory

Orders: TypeAlias = Mapping[str, Sequence[int]]  # of each parameter's axes in memory
NO_ORDERS: Orders = MappingProxyType({})


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


@dataclass
class Claims:
    """The state that new buckets claim.

    Attributes:
        parameters: what is unclaimed, by name.
        buckets: those of a loaded state, or before a swap, that were not met yet.
        swapped: buckets before a swap, which cut no new ones.
        cuts: buckets of a loaded state that were met inside of a larger one, or in another order. They are met there again
            when it is bound anew, as after the first step of a static graph or a swap, until torch makes its buckets anew.
        orders: of each parameter that anything is remembered of, how its axes lay in memory then, that of the largest
            stride first. An axis of one element has no place among them. A parameter that is missing lay row by row.
    """

    parameters: dict[str, Unclaimed] = field(default_factory=dict)
    buckets: list[tuple[str, ...]] = field(default_factory=list)
    swapped: set[tuple[str, ...]] = field(default_factory=set)
    cuts: list[tuple[str, ...]] = field(default_factory=list)
    orders: dict[str, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: Mapping[str, Any], compressor: Compressor) -> Claims:
        """Return those of a saved state."""
        claims = cls(
            buckets=[tuple(names) for names in saved["buckets"] if names], orders=dict(saved.get("orders", {}))
        )
        for name, fields in saved["parameters"].items():
            detached = {field: numbers.detach() for field, numbers in fields.items()}
            claims.parameters[name] = Unclaimed(detached, compressor, ranks_per_host=saved.get("ranks_per_host"))
        return claims

    def expect(self, names: Iterable[str], compressor: Compressor, ranks_per_host: int) -> None:
        """Raise ValueError where a state was loaded, and none of its parameters has one of these names, or hosts differ."""
        hosts = {each.ranks_per_host for each in self.parameters.values() if each.compressor == compressor}
        if other := hosts - {None, ranks_per_host}:
            raise ValueError(
                f"the state was saved on hosts of {other.pop()} ranks, here they have {ranks_per_host}: load the states of "
                f"all ranks with load_state_dict(states, resize=True)"
            )
        loaded = {*self.parameters, *(name for bucket in self.buckets for name in bucket)}
        if loaded and loaded.isdisjoint(names):
            raise ValueError(
                f"the loaded state is of parameters such as {min(loaded)!r}, the model has others, such as {min(names)!r}: "
                f"call handle.bind(model), then load the state again"
            )

    def split(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """The buckets of a loaded state that together hold exactly these parameters; else all of them as one."""
        wanted = tuple(names)
        loaded = [saved for saved in dict.fromkeys((*self.cuts, *self.buckets)) if saved not in self.swapped]
        inside = [saved for saved in loaded if set(saved).issubset(wanted)]
        self.forget(wanted)
        if sum(map(len, inside)) != len(wanted):
            return [wanted]
        if inside != [wanted]:
            self.cuts += inside
        return inside

    def forget(self, names: Iterable[str]) -> None:
        """Drop the buckets of a loaded state that have any of these parameters."""
        members = set(names)
        self.buckets, self.cuts = (
            [saved for saved in listed if members.isdisjoint(saved)] for listed in (self.buckets, self.cuts)
        )

    def moves(self, orders: Orders) -> Iterator[str]:
        """The parameters whose axes lie in another order than what is remembered of them."""
        return (name for name, order in orders.items() if list(self.orders.get(name, sorted(order))) != list(order))

    def follow(self, layout: Layout, orders: Orders, compressor: Compressor, step: int) -> bool:
        """Move what is remembered of a new bucket's parameters to where their elements lie now; True if anything moved."""
        found = False
        for name in list(self.moves(orders)):
            each, before = self.parameters.get(name), self.orders.get(name, sorted(orders[name]))
            if each is None or sorted(before) != sorted(orders[name]):
                continue
            alone = layout.select((layout.names.index(name),))
            alone = replace(alone, ranks=replace(alone.ranks, per_host=each.ranks_per_host or alone.ranks.per_host))
            move = Move.of(alone.shapes[0], before, orders[name])
            fields = moved(each.fields, move, each.compressor or compressor, alone, step)
            self.parameters[name] = replace(each, fields=fields, layout=None if each.layout is None else alone)
            found = True
        self.orders.update(orders)
        return found

    def release(self, bucket: SlicedMemory, compressor: Compressor) -> None:
        """Keep the state of a bucket that is no more."""
        saved, layout = bucket.save(), bucket.layout
        for place, name in enumerate(layout.names):
            if name in saved:
                self.parameters[name] = Unclaimed(saved[name], compressor, layout.select((place,)))

    def claim(self, bucket: SlicedMemory, compressor: Compressor, step: int) -> None:
        """Move the state of its parameters into a new bucket. From a compressor before a swap it takes what is held back."""
        mine = {name: self.parameters.pop(name) for name in bucket.layout.names if name in self.parameters}
        swapped = {name: each for name, each in mine.items() if each.compressor not in (None, compressor)}
        bucket.load({name: each.fields for name, each in mine.items() if name not in swapped})
        if swapped:
            one = next(iter(swapped.values()))  # they are of one load
            assert one.compressor is not None
            ranks = replace(bucket.layout.ranks, per_host=one.ranks_per_host or 1)
            former = BucketMemory(one.compressor, replace(bucket.layout, ranks=ranks), step)
            former.load({name: each.fields for name, each in swapped.items()})
            bucket.carry_over(former.held_back())

    def swap(self, live: Mapping[tuple[str, ...], SlicedMemory], step: int) -> None:
        """Have what buckets hold back, and what is unclaimed, be carried to the next average, whatever compresses that."""
        owed = [each.memory(step).held_back() for each in self.parameters.values() if each.layout is not None]
        owed += [bucket.held_back() for bucket in live.values()]
        self.parameters |= {name: Unclaimed({CARRIED_OVER: held[name]}) for held in owed for name in held}
        self.buckets = [*live, *self.buckets]
        self.swapped.update(names for names in live if names not in self.cuts)

    def rescale(self, factor: float, step: int) -> None:
        """Multiply what is held back. Raises RuntimeError, changing nothing, for a loaded state that no step took up yet."""
        rescaled = {name: each.rescaled(factor, step) for name, each in self.parameters.items()}
        self.parameters = {name: each for name, each in rescaled.items() if each.fields}
