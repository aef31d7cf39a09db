"""The memory of a compressor for a whole model: bucket by bucket, by parameter name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...compress import specification
from ...compress.protocol.compressor import Compressor, traits_of
from ...compress.protocol.layout import Layout
from ...compress.protocol.requests import Program
from ...compress.state.shares import ranks_given
from ...compress.state.tree import Entries, Leaves
from ...kernels import all_finite
from ..buckets.grad_bucket import as_real
from ..buckets.sparse import sparse_mean
from .bucket_memory import CARRIED_OVER, BucketMemory, DeviceFlag
from .sliced_memory import SlicedMemory, may_be_cut
from .step_memory import StepMemory


def _check_partial(compressor: Compressor, partial: bool) -> None:
    if partial and traits_of(compressor).needs_all_parameters:
        raise ValueError(
            f"{specification(compressor)} needs the gradients of all parameters in every step, and with "
            f"find_unused_parameters=True some may be missing: leave out momentum=, or set it to False"
        )


@dataclass(frozen=True)
class Snapshot:
    """The memory of a model after `step` steps; later ones do not change it. `loaded`: what no bucket has taken up yet.

    `ranks_per_host`: where a compressor of two levels took them into account.
    """

    compressor: Compressor
    step: int
    buckets: Sequence[tuple[str, ...]]
    loaded: Entries
    live: Sequence[SlicedMemory]
    ranks_per_host: int | None = None

    @property
    def begun(self) -> bool:
        """True if there may be anything to save."""
        return bool(self.step or self.loaded or self.live)

    def state_dict(self) -> dict[str, Any]:
        """{"step", "buckets": names of each bucket in order, "parameters": {name: {field: tensor}}}; copies."""
        entries = dict(self.loaded)
        for bucket in self.live:
            entries.update(bucket.save())
        hosts = {} if self.ranks_per_host is None else {"ranks_per_host": self.ranks_per_host}
        return {"step": self.step, "buckets": list(map(list, self.buckets)), "parameters": entries, **hosts}


class ModelMemory(StepMemory):
    """The memory of all buckets of a model. It follows parameters by name when buckets change. `undo`: see `StepMemory`."""

    def __init__(self, compressor: Compressor, *, partial: bool = False, undo: bool | None = True) -> None:
        _check_partial(compressor, partial)
        super().__init__(undo)
        self._choose(compressor)
        self.partial = partial
        self._unclaimed_buckets: list[tuple[str, ...]] = []  # buckets of a loaded state that have not been met yet
        self._live: dict[tuple[str, ...], SlicedMemory] = {}
        self.carrying = False  # whether any rank may owe something outside a compressor's state; the same on all ranks
        self._names_before: list[tuple[str, ...]] = []  # of the buckets when the step that is under way began
        self._stateful: bool | None = None  # whether any bucket is; None until a step has met them all
        self._sparse_finite: list[DeviceFlag] = []  # of the step that is under way
        self._unclaimed: Entries = {}
        self._layouts: dict[str, Layout] = {}  # of those of them that had a bucket, each parameter's alone
        self._former_compressor: Compressor | None = None  # of `_former_state`: loaded, then swapped before any step
        self._former_state: Entries = {}
        self.saved_ranks_per_host: int | None = None  # of a loaded state that no step has taken up
        self._former_ranks_per_host: int | None = None  # those where the state of `_former_compressor` was

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
        if not self.carrying or self._unclaimed or self._former_state:
            return self.carrying
        # reversed: within a step the last one has not
        came = all(each.brought_out for bucket in reversed(self._live.values()) for each in reversed(bucket.slices))
        return not (came and self._finite())

    def _finite(self) -> bool:
        """Return True if the averages of the last step were finite, and nobody has discarded it."""
        if self._discarded:
            return False
        return all(map(bool, self._sparse_finite)) and all(
            each.finite() for bucket in self._live.values() for each in bucket.slices
        )

    def get(self, layout: Layout, cuts: Sequence[Layout] = ()) -> SlicedMemory | None:
        """The bucket of this layout, if it is known; `cuts`: of its slices, where it is sent in some."""
        bucket = self._live.get(layout.names)
        return bucket if bucket is not None and (bucket.layout, bucket.cuts) == (layout, tuple(cuts)) else None

    def expect(self, names: Iterable[str], ranks_per_host: int = 1) -> None:
        """Raise ValueError where a state was loaded, and none of its parameters has one of these names, or hosts differ."""
        if self.saved_ranks_per_host not in (None, ranks_per_host):
            raise ValueError(
                f"the state was saved on hosts of {self.saved_ranks_per_host} ranks, here they have {ranks_per_host}: load "
                f"the states of all ranks with load_state_dict(states, resize=True)"
            )
        self.saved_ranks_per_host = None
        loaded = {
            *self._unclaimed,
            *self._former_state,
            *(name for bucket in self._unclaimed_buckets for name in bucket),
        }
        if loaded and loaded.isdisjoint(names):
            raise ValueError(
                f"the loaded state is of parameters such as {min(loaded)!r}, the model has others, such as {min(names)!r}: "
                f"call handle.bind(model), then load the state again"
            )

    def add(self, layout: Layout, cuts: Sequence[Layout] = ()) -> SlicedMemory:
        """A new bucket; the state of its parameters moves in from the buckets that held them."""
        members = set(layout.names)
        for names in [names for names in self._live if members.intersection(names)]:
            self._release(self._live.pop(names))
        options = {"partial": self.partial, "carrying": self.carrying, "undo": bool(self.undo)}
        bucket = SlicedMemory(self.compressor, layout, cuts, self.step, **options)
        bucket.load({name: self._unclaimed.pop(name) for name in layout.names if name in self._unclaimed})
        self._layouts = {name: layout for name, layout in self._layouts.items() if name in self._unclaimed}
        self._adopt(bucket)
        self._live[layout.names] = bucket
        self._stateful = None
        return bucket

    def _release(self, bucket: SlicedMemory) -> None:
        """Keep the state of a bucket that is no more, until others claim it."""
        self._unclaimed.update(bucket.save())
        self._layouts |= {name: bucket.layout.select((place,)) for place, name in enumerate(bucket.layout.names)}

    def _released(self) -> Iterator[tuple[str, BucketMemory]]:
        """A memory of its own for each parameter whose state was released and not claimed."""
        for name, layout in self._layouts.items():
            if name in self._unclaimed:
                memory = BucketMemory(self.compressor, layout, self.step)
                memory.load({name: self._unclaimed[name]})
                yield name, memory

    def arrange(self, order: Iterable[tuple[str, ...]]) -> None:
        """Have the buckets in this order where they are listed; the first mention counts."""
        self._live = {names: self._live[names] for names in (*order, *self._live) if names in self._live}

    def _adopt(self, bucket: SlicedMemory) -> None:
        """Let a bucket owe what another compressor's state holds back for its parameters."""
        names = [name for name in bucket.layout.names if name in self._former_state]
        if names and self._former_compressor is not None:
            ranks = dataclasses.replace(bucket.layout.ranks, per_host=self._former_ranks_per_host or 1)
            layout = dataclasses.replace(bucket.layout, ranks=ranks)
            former = BucketMemory(self._former_compressor, layout, self.step)
            former.load({name: self._former_state.pop(name) for name in names})
            bucket.carry_over(former.held_back())
        if not self._former_state:
            self._former_compressor = None

    @property
    def watched(self) -> bool:
        """True if any bucket has something to undo, or may have, where some buckets are not known yet."""
        return self.carrying or not self._plain if self._stateful is None else self._stateful

    def reduce_sparse(self, world_size: int, gradient: Tensor, _step: int, watched: bool) -> Program[Tensor]:
        """The mean over ranks of a sparse gradient, which no compressor sees. `watched` as for a bucket."""
        average = yield from sparse_mean(gradient, world_size)
        if watched:
            self._sparse_finite.append(DeviceFlag(all_finite(as_real(average.values()))))
        return average

    def split(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """The buckets of a loaded state that together hold exactly these parameters; else all of them as one."""
        wanted = tuple(names)
        inside = [saved for saved in self._unclaimed_buckets if set(saved).issubset(wanted)]
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
        self._sparse_finite = []
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
        released = {name: memory.held_back()[name] for name, memory in self._released()}
        if self._former_compressor is None:
            self._former_compressor = self.compressor
            self._former_state = {name: fields for name, fields in self._unclaimed.items() if name not in released}
            self._unclaimed = {}
            self._former_ranks_per_host, self.saved_ranks_per_host = self.saved_ranks_per_host, None
        for held_back in (released, *(bucket.held_back() for bucket in self._live.values())):
            self._unclaimed |= {name: {CARRIED_OVER: numbers} for name, numbers in held_back.items()}
        self._choose(compressor)
        self._unclaimed_buckets = [*self._live, *self._unclaimed_buckets]
        self._live, self._stateful, self._layouts = {}, None, {}
        self.carrying = bool(self._unclaimed or self._former_state)

    def rescale(self, factor: float) -> None:
        """Multiply what all buckets hold back. Raises RuntimeError for a loaded state that no step has taken up yet."""
        self.commit()
        others = [fields for name, fields in self._unclaimed.items() if name not in self._layouts]
        if self._former_state or any(set(fields) != {CARRIED_OVER} for fields in others):
            raise RuntimeError("a loaded state can be rescaled after the next backward, not before it")
        for name, memory in list(self._released()):
            memory.rescale(factor)
            if name in (saved := memory.save()):
                self._unclaimed[name] = saved[name]
            else:  # it held nothing back
                del self._unclaimed[name], self._layouts[name]
        for fields in others:
            fields[CARRIED_OVER] = fields[CARRIED_OVER] * factor
        for _, each in self.live:
            each.rescale(factor)

    def snapshot(self, *, under_way: bool = False) -> Snapshot:
        """The memory after the last step, or before the one that is `under_way`; copies pointers only.

        Raises RuntimeError for a state that was loaded, then swapped, and that no step has taken up.
        """
        if self._former_state:
            raise RuntimeError(
                "a state that was loaded, then swapped, can be saved after the next backward, not before it"
            )
        if under_way:
            self.note_save_within()
        carrying, keep = (self.carrying, False) if under_way else (self._still_carrying(), self._finite())
        buckets = self._names_before if under_way else [*self._live, *self._unclaimed_buckets]
        loaded = {name: dict(fields) for name, fields in self._unclaimed.items()}
        live = [bucket.snapshot(keep=keep, carrying=carrying) for bucket in self._live.values()]
        on_hosts = {bucket.layout.ranks.per_host for bucket in live} if ranks_given(self.compressor) is not None else ()
        return Snapshot(
            self.compressor,
            self.step - under_way,
            buckets,
            loaded,
            live,
            max(on_hosts, default=self.saved_ranks_per_host),
        )

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take a saved state; buckets claim their parts when they are met."""
        self.step, self.committed, self._discarded = int(saved["step"]), True, False
        self._unclaimed_buckets = [tuple(names) for names in saved["buckets"] if names]
        self._live, self._stateful, self._layouts = {}, None, {}
        self._unclaimed = {
            name: {field: numbers.detach() for field, numbers in fields.items()}
            for name, fields in saved["parameters"].items()
        }
        self.carrying = any(CARRIED_OVER in fields for fields in self._unclaimed.values())
        self.saved_ranks_per_host = saved.get("ranks_per_host")
        self._former_compressor, self._former_state = None, {}
