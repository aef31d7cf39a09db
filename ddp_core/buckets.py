"""Buckets: which parameters are reduced together, and what their compressor remembers of them, step after step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..compress import state as states
from ..compress.protocol import Compressor, Layout, Program, all_reduce
from ..compress.state import Entries
from ..compress.together import together
from ..kernels import all_finite
from .parameters import as_real
from .sparse import sparse_mean
from .verdict import Verdict

OWED = "owed"  # the field under which a state dict keeps gradient that has lost its place


class Bucket:
    """A bucket's compressor state, with every step a transaction.

    A step whose average is not finite on any bucket is one that GradScaler skips: its changes to the state are undone.
    With `partial`, some steps may leave parameters out on all ranks: what would be averaged for those is kept for later,
    since DDP drops it. `inherits`: it may be given something to owe.
    """

    def __init__(
        self, compressor: Compressor, layout: Layout, step: int, *, partial: bool = False, inherits: bool = False
    ) -> None:
        self.layout = layout
        self.owed: dict[str, Tensor] = {}
        self._compressor = compressor
        self.state = compressor.init(layout)
        states.set_step(self.state, step)
        self._tensors = [tensor for _, leaf in states.leaves(self.state) for tensor in leaf.tensors()]
        self._kept: Tensor | None = None
        if partial and (self._tensors or inherits):
            self._kept = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
            self._tensors.append(self._kept)
            self._sizes = torch.tensor(layout.sizes, device=layout.device)
        self._before = [torch.empty_like(tensor) for tensor in self._tensors]
        self._verdict: Verdict | None = None
        self._begun = False  # `_before` is from the step that is under way

    @property
    def stateful(self) -> bool:
        """Whether a step changes anything that may have to be undone."""
        return bool(self._tensors or self.owed)

    def reduce(self, flat: Tensor, step: int, watched: bool) -> Program[Tensor]:
        """Average the bucket over ranks, in place of `flat`. `watched`: it has a say in whether the step counts."""
        _copy(self._tensors, self._before)
        self._begun = True
        states.set_step(self.state, step)
        used = None if self._kept is None else self._used(flat)
        self._add_owed(flat)
        if used is None:
            average = yield from self._compressor.reduce(flat, self.state)
        else:
            average = yield from self._reduce_used(flat, used)
        if average is not flat:
            flat.copy_(average)
        if watched:
            self._verdict = Verdict(all_finite(flat))
        return flat

    def _used(self, flat: Tensor) -> Tensor:
        """1 for each parameter with a gradient on this rank, 0 for those whose gradient is all zeros."""
        return torch.stack([view.any() for view in self.layout.views(flat).values()]).float()

    def _add_owed(self, flat: Tensor) -> None:
        views = self.layout.views(flat) if self.owed else {}
        for name, numbers in self.owed.items():
            views[name].view(-1).add_(numbers)
        if self._kept is not None:
            flat.add_(self._kept)

    def _reduce_used(self, flat: Tensor, used: Tensor) -> Program[Tensor]:
        """The average of the parameters that any rank used; that of the others stays here."""
        results: list[Tensor] = yield from together(self._compressor.reduce(flat, self.state), all_reduce(used))
        average, shares = results
        unused = (shares == 0).repeat_interleave(self._sizes, output_size=self.layout.numel)
        assert self._kept is not None
        self._kept.copy_(torch.where(unused, average, 0))
        return average.masked_fill_(unused, 0)

    def held_back(self) -> dict[str, Tensor]:
        """All gradient that this rank has not given to an average yet, flat, by parameter name."""
        return states.summed([states.held_back(self.state), self._dropped()])

    def _dropped(self) -> dict[str, Tensor]:
        """What is held back outside the compressor's state, by parameter name."""
        if self._kept is None:
            return states.summed([self.owed])
        kept = {name: view.reshape(-1) for name, view in self.layout.views(self._kept).items() if view.any()}
        return states.summed([self.owed, kept])

    def finite(self) -> bool:
        """Whether the last average was finite."""
        return self._verdict is None or bool(self._verdict)

    def settle(self, keep: bool) -> None:
        """End the step: keep what it changed, or undo it."""
        self._begun = False
        if self._verdict is None:
            return
        self._verdict = None
        if keep:
            self.owed = {}
        else:
            _copy(self._before, self._tensors)

    def save(self) -> Entries:
        """Copies of all numbers of the state, by parameter name and field."""
        entries = states.save(self.state)
        for name, numbers in self._dropped().items():
            entries.setdefault(name, {})[OWED] = numbers
        return entries

    def save_before(self) -> Entries:
        """As `save`, but of the state before the step that is under way."""
        if not self._begun:
            return self.save()
        now = [tensor.clone() for tensor in self._tensors]
        _copy(self._before, self._tensors)
        try:
            return self.save()
        finally:
            _copy(now, self._tensors)

    def load(self, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take saved numbers; those that lost their place are owed to the next average."""
        for name, numbers in states.load(self.state, entries).items():
            self.owe(name, numbers)
        for name, fields in entries.items():
            if OWED in fields:
                self.owe(name, fields[OWED])

    def rescale(self, factor: float) -> None:
        """Multiply what is held back."""
        states.rescale(self.state, factor)
        self.owed = {name: numbers * factor for name, numbers in self.owed.items()}
        if self._kept is not None:
            self._kept.mul_(factor)

    def owe(self, name: str, numbers: Tensor) -> None:
        """Add to the next gradient of a parameter."""
        mine = numbers.to(device=self.layout.device, dtype=self.layout.widened().dtype)
        self.owed[name] = self.owed[name] + mine if name in self.owed else mine


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    if source:
        torch._foreach_copy_(target, source)


class Buckets:
    """All buckets of a model. State follows parameters by name when buckets change."""

    def __init__(self, compressor: Compressor, *, partial: bool = False) -> None:
        self.compressor = compressor
        self.partial = partial
        self.step = 0
        self.plan: list[tuple[str, ...]] = []  # buckets of a loaded state that have not been met yet
        self._live: dict[tuple[str, ...], Bucket] = {}
        self._inherits = False  # whether buckets may be given something to owe; the same on all ranks
        self._names_before: list[tuple[str, ...]] = []  # of the buckets when the step that is under way began
        self._met = False  # a step has come to its end since the last bucket was added, so all are known
        self._sparse_verdicts: list[Verdict] = []  # of the step that is under way
        self._homeless: Entries = {}
        self._former: Compressor | None = None  # whose state `_foreign` is: loaded, then swapped before any step
        self._foreign: Entries = {}

    @property
    def averages(self) -> bool:
        """Whether the compressor only averages, and nothing is owed: gradients may then come divided already."""
        coming = self._homeless or self._foreign or (self._inherits and self.partial and not self._live)
        owing = coming or any(bucket.stateful for bucket in self._live.values())
        return getattr(self.compressor, "averages", False) and not owing

    @property
    def remembers(self) -> bool:
        """Whether what a step is given may be kept, or brings out what was kept; the same on all ranks."""
        return not getattr(self.compressor, "averages", False) or (self.partial and self._inherits)

    def get(self, layout: Layout) -> Bucket | None:
        """The bucket of this layout, if it is known."""
        bucket = self._live.get(layout.names)
        return bucket if bucket is not None and bucket.layout == layout else None

    def add(self, layout: Layout) -> Bucket:
        """A new bucket; the state of its parameters moves in from the buckets that held them."""
        members = set(layout.names)
        for names in [names for names in self._live if members.intersection(names)]:
            self._homeless.update(self._live.pop(names).save())
        bucket = Bucket(self.compressor, layout, self.step, partial=self.partial, inherits=self._inherits)
        bucket.load({name: self._homeless.pop(name) for name in layout.names if name in self._homeless})
        self._adopt(bucket)
        self._live[layout.names] = bucket
        self._met = False
        return bucket

    def arrange(self, order: Iterable[tuple[str, ...]]) -> None:
        """Have the buckets in this order where they are listed; the first mention counts."""
        self._live = {names: self._live[names] for names in (*order, *self._live) if names in self._live}

    def _adopt(self, bucket: Bucket) -> None:
        """Let a bucket owe what another compressor's state holds back for its parameters."""
        names = [name for name in bucket.layout.names if name in self._foreign]
        if names and self._former is not None:
            former = Bucket(self._former, bucket.layout, self.step)
            former.load({name: self._foreign.pop(name) for name in names})
            for name, numbers in former.held_back().items():
                bucket.owe(name, numbers)
        if not self._foreign:
            self._former = None

    @property
    def watched(self) -> bool:
        """Whether any bucket has something to undo; where some may not have been met, whether any may have."""
        strange = not self._met and not self.averages
        return strange or any(bucket.stateful for bucket in self._live.values())

    def reduce_sparse(self, gradient: Tensor, world_size: int, watched: bool) -> Program[Tensor]:
        """The mean over ranks of a sparse gradient, which no compressor sees. `watched` as for a bucket."""
        average = yield from sparse_mean(gradient, world_size)
        if watched:
            self._sparse_verdicts.append(Verdict(all_finite(as_real(average.values()))))
        return average

    def split(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """The buckets of a loaded state that together hold exactly these parameters; else all of them as one."""
        wanted = tuple(names)
        inside = [planned for planned in self.plan if set(planned).issubset(wanted)]
        self.plan = [planned for planned in self.plan if not set(planned).intersection(wanted)]
        exact = sum(map(len, inside)) == len(wanted)
        return inside if exact else [wanted]

    def settle(self) -> None:
        """End the step before: undo it everywhere if its average was not finite anywhere."""
        keep = all(map(bool, self._sparse_verdicts)) and all(bucket.finite() for bucket in self._live.values())
        self._sparse_verdicts = []
        self._met, self._names_before = bool(self._live), [*self._live, *self.plan]
        for bucket in self._live.values():
            bucket.settle(keep)

    def replace(self, compressor: Compressor) -> None:
        """Go on with another compressor; what was held back is owed to the next average."""
        self.settle()
        if self._former is None:
            self._former, self._foreign = self.compressor, self._homeless
            self._homeless = {}
        for bucket in self._live.values():
            for name, numbers in bucket.held_back().items():
                self._homeless[name] = {OWED: numbers}
        self.compressor = compressor
        self._live, self._inherits = {}, True

    def rescale(self, factor: float) -> None:
        """Multiply what all buckets hold back. Raises RuntimeError for a loaded state that no step has taken up yet."""
        self.settle()
        if self._foreign or any(set(fields) != {OWED} for fields in self._homeless.values()):
            raise RuntimeError("a loaded state can be rescaled after the next backward, not before it")
        for fields in self._homeless.values():
            fields[OWED] = fields[OWED] * factor
        for bucket in self._live.values():
            bucket.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """{"step", "buckets": names of each bucket in order, "parameters": {name: {field: tensor}}}."""
        self.settle()
        return self._saved(self.step, [*self._live, *self.plan], [bucket.save() for bucket in self._live.values()])

    def state_before(self) -> dict[str, Any]:
        """The state dict as it was before the step that is under way."""
        before = [bucket.save_before() for bucket in self._live.values()]
        return self._saved(self.step - 1, self._names_before, before)

    def _saved(self, step: int, buckets: list[tuple[str, ...]], live: Iterable[Entries]) -> dict[str, Any]:
        if self._foreign:
            raise RuntimeError(
                "a state that was loaded, then swapped, can be saved after the next backward, not before it"
            )
        entries = dict(self._homeless)
        for each in live:
            entries.update(each)
        return {"step": step, "buckets": list(map(list, buckets)), "parameters": entries}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take a saved state; buckets claim their parts when they are met."""
        self.step = int(saved["step"])
        self.plan = [tuple(names) for names in saved["buckets"] if names]
        self._live = {}
        self._homeless = {name: dict(fields) for name, fields in saved["parameters"].items()}
        self._inherits = any(OWED in fields for fields in self._homeless.values())
        self._former, self._foreign = None, {}
