"""Buckets: which parameters are reduced together, and what their compressor remembers of them, step after step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..compress import state as states
from ..compress.protocol import Compressor, Layout, Program
from ..compress.state import Entries
from ..kernels import all_finite

OWED = "owed"  # the field under which a state dict keeps gradient that has lost its place


class Bucket:
    """A bucket's compressor state, with every step a transaction.

    A step whose average is not finite on any bucket is one that GradScaler skips: its changes to the state are undone.
    """

    def __init__(self, compressor: Compressor, layout: Layout, step: int) -> None:
        self.layout = layout
        self.owed: dict[str, Tensor] = {}
        self._compressor = compressor
        self.state = compressor.init(layout)
        states.set_step(self.state, step)
        self._tensors = [tensor for _, leaf in states.leaves(self.state) for tensor in leaf.tensors()]
        self._before = [torch.empty_like(tensor) for tensor in self._tensors]
        self._verdict: Verdict | None = None

    def reduce(self, flat: Tensor, step: int) -> Program[Tensor]:
        """Average the bucket over ranks, in place of `flat`."""
        _copy(self._tensors, self._before)
        states.set_step(self.state, step)
        views = self.layout.views(flat) if self.owed else {}
        for name, numbers in self.owed.items():
            views[name].view(-1).add_(numbers)
        average = yield from self._compressor.reduce(flat, self.state)
        if average is not flat:
            flat.copy_(average)
        if self._tensors or self.owed:
            self._verdict = Verdict(all_finite(flat))
        return flat

    def finite(self) -> bool:
        """Whether the last average was finite."""
        return self._verdict is None or bool(self._verdict)

    def settle(self, keep: bool) -> None:
        """End the step: keep what it changed, or undo it."""
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
        for name, numbers in self.owed.items():
            entries.setdefault(name, {})[OWED] = numbers.clone()
        return entries

    def load(self, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take saved numbers; those that lost their place are owed to the next average."""
        for name, numbers in states.load(self.state, entries).items():
            self.owe(name, numbers)
        for name, fields in entries.items():
            if OWED in fields:
                self.owe(name, fields[OWED])

    def owe(self, name: str, numbers: Tensor) -> None:
        """Add to the next gradient of a parameter."""
        mine = numbers.to(device=self.layout.device, dtype=self.layout.widened().dtype)
        self.owed[name] = self.owed[name] + mine if name in self.owed else mine


class Verdict:
    """A flag on its way from the device to the host; only reading it waits, and by the next step it has arrived."""

    def __init__(self, flag: Tensor) -> None:
        self._flag = flag.to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if flag.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(flag.device))

    def __bool__(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._flag)


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    if source:
        torch._foreach_copy_(target, source)


class Buckets:
    """All buckets of a model. State follows parameters by name when buckets change."""

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.step = 0
        self.plan: list[tuple[str, ...]] = []  # buckets of a loaded state that have not been met yet
        self._live: dict[tuple[str, ...], Bucket] = {}
        self._homeless: Entries = {}

    def get(self, layout: Layout) -> Bucket | None:
        """The bucket of this layout, if it is known."""
        bucket = self._live.get(layout.names)
        return bucket if bucket is not None and bucket.layout == layout else None

    def add(self, layout: Layout) -> Bucket:
        """A new bucket; the state of its parameters moves in from the buckets that held them."""
        members = set(layout.names)
        for names in [names for names in self._live if members.intersection(names)]:
            self._homeless.update(self._live.pop(names).save())
        bucket = Bucket(self.compressor, layout, self.step)
        bucket.load({name: self._homeless.pop(name) for name in layout.names if name in self._homeless})
        self._live[layout.names] = bucket
        return bucket

    def split(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """The buckets of a loaded state that together hold exactly these parameters; else all of them as one."""
        wanted = tuple(names)
        inside = [planned for planned in self.plan if set(planned).issubset(wanted)]
        self.plan = [planned for planned in self.plan if planned not in inside]
        exact = sum(map(len, inside)) == len(wanted)
        return inside if exact else [wanted]

    def settle(self) -> None:
        """End the step before: undo it everywhere if its average was not finite anywhere."""
        keep = all(bucket.finite() for bucket in self._live.values())
        for bucket in self._live.values():
            bucket.settle(keep)

    def replace(self, compressor: Compressor) -> None:
        """Go on with another compressor; what was held back is owed to the next average."""
        self.settle()
        owed: dict[str, Tensor] = {}
        for bucket in self._live.values():
            for source in (states.held_back(bucket.state), bucket.owed):
                for name, numbers in source.items():
                    owed[name] = owed[name] + numbers if name in owed else numbers.clone()
        self.compressor = compressor
        self._live = {}
        self._homeless = {name: {OWED: numbers} for name, numbers in owed.items()}

    def state_dict(self) -> dict[str, Any]:
        """{"step", "buckets": names of each bucket in order, "parameters": {name: {field: tensor}}}."""
        self.settle()
        entries = dict(self._homeless)
        for bucket in self._live.values():
            entries.update(bucket.save())
        buckets = [list(names) for names in (*self._live, *self.plan)]
        return {"step": self.step, "buckets": buckets, "parameters": entries}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take a saved state; buckets claim their parts when they are met."""
        self.step = int(saved["step"])
        self.plan = [tuple(names) for names in saved["buckets"]]
        self._live = {}
        self._homeless = {name: dict(fields) for name, fields in saved["parameters"].items()}
