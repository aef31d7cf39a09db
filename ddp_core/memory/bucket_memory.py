"""The memory of a compressor for a bucket, or for a slice of one."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...compress.builder.build import specification
from ...compress.protocol.compressor import Compressor
from ...compress.protocol.layout import Layout, working_dtype
from ...compress.protocol.requests import Program, all_reduce, together
from ...compress.state import tree as states
from ...compress.state.gauge import gauges
from ...compress.state.leaf import Versions
from ...compress.state.shares import ranks_given
from ...compress.state.tree import Entries, FlatLeaf, Leaves
from ...kernels import Residual, all_finite
from .out_of_memory import allocated, kept_bytes

CARRIED_OVER = "carried_over"  # the field under which a state dict keeps gradient that has lost its place


class CarriedOver(FlatLeaf):
    """Gradient of this rank that has no place in its compressor's state: the next step adds it to the bucket's gradients.

    Rebuilt buckets, a swap and a resize leave some.
    """

    versioned = True

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.versions = Versions(torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device))

    def add(self, gradient: Mapping[str, Tensor]) -> None:
        """Add numbers, flat, by parameter name, between two steps."""
        wide = self.layout.widened()
        flat = self.flat.to(wide.dtype, copy=True)  # a snapshot may have the old one
        views = wide.views(flat)
        for name, numbers in gradient.items():
            views[name].view(-1).add_(numbers.to(wide.device))
        self.versions, self._room = Versions(flat), None

    def reduce(self, flat: Tensor, compressor: Compressor, state: Any, leaves: Leaves) -> Program[Tensor]:
        """Average a bucket's gradients and these numbers, by a compressor whose state has these leaves."""
        rest = self._bring_out(flat, compressor, leaves)
        self.clear()
        return compressor.reduce(flat, state, rest)

    def _bring_out(self, flat: Tensor, compressor: Compressor, leaves: Leaves) -> Residual | None:
        """Move the numbers to this rank's gradient; what 16 bits cannot hold of the sum stays held back.

        Where ranks of a host share what is held back, that goes beside the gradient into the host's sum.
        """
        exact = flat.to(working_dtype(flat.dtype)).add_(self.flat)
        if exact is flat:
            return None
        flat.copy_(exact)
        rest = exact.sub_(flat)
        leaves.hold(self.layout, rest)
        return Residual(rest, rest) if leaves.residuals and ranks_given(compressor) is not None else None


class UnusedAverages(CarriedOver):
    """The averages of parameters that no rank has used: DDP drops them, so each step carries its own over."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._sizes = torch.tensor(layout.sizes, device=layout.device)

    def reduce(self, flat: Tensor, compressor: Compressor, state: Any, leaves: Leaves) -> Program[Tensor]:
        """Average a bucket's gradients and these numbers; of parameters that no rank has used, keep the average."""
        used = self._used(flat)
        rest = self._bring_out(flat, compressor, leaves)
        average: Tensor
        average, shares = yield from together(compressor.reduce(flat, state, rest), all_reduce(used))
        unused = (shares == 0).repeat_interleave(self._sizes, output_size=self.layout.numel)
        self.update().after.copy_(torch.where(unused, average, 0))
        average.masked_fill_(unused, 0)
        return average

    def _used(self, flat: Tensor) -> Tensor:
        """1 for each parameter with a gradient on this rank, 0 for those whose gradient is all zeros."""
        pieces = flat.split(self.layout.sizes)
        if flat.is_cuda and all(self.layout.sizes):  # one kernel, not one for each parameter
            return torch.stack(torch._foreach_norm(pieces, math.inf)).ne(0).float()
        return torch.stack([piece.any() for piece in pieces]).float()


class BucketMemory:
    """The compressor state of what is sent at once, with every step a transaction.

    A step whose average is not finite on any bucket is one that GradScaler skips: its changes to the state are undone. That
    takes a second copy of the state. Without `undo`, only what ranks share has one, which is small; residuals and momenta
    are overwritten in place, and a step that is undone leaves zeros of those that it has overwritten.
    `partial`: some steps may leave parameters out on all ranks. `any_rank_owes`: any rank may be given carried gradient.
    """

    def __init__(
        self,
        compressor: Compressor,
        layout: Layout,
        step: int,
        *,
        partial: bool = False,
        any_rank_owes: bool = False,
        undo: bool = True,
    ) -> None:
        self.layout = layout
        self._compressor = compressor
        self.state = allocated(
            lambda: compressor.init(layout),
            lambda: (specification(compressor), kept_bytes(compressor, layout)),
            layout,
        )
        self.gauge = next(gauges(self.state), None)
        self.leaves = Leaves(self.state, versioned=undo)
        if not undo:
            self.leaves.version_what_ranks_share()
        self.leaves.set_step(step)
        self._counts_on_cuda = layout.device.type == "cuda" and bool(self.leaves.counters)
        self.finite: DeviceFlag | None = None  # the average of the step that is under way was; None before there is one
        self._any_rank_owes = any_rank_owes  # any rank may owe gradient; the same on all ranks
        self._owes_after_step: DeviceFlag | None = None  # whether this rank does; asked while `_any_rank_owes`
        self._owed_here: CarriedOver | UnusedAverages | None = None  # None: nothing is owed here
        if partial and (any_rank_owes or self.leaves.flat) and layout.numel:
            self._owed_here = UnusedAverages(layout)

    @property
    def stateful(self) -> bool:
        """True if a step changes anything that may have to be undone."""
        return bool(self.leaves.flat) or self._any_rank_owes or self._owed_here is not None

    def reduce(self, flat: Tensor, step: int, watched: bool) -> Program[Tensor]:
        """Average the bucket over ranks, in place of `flat`. `watched`: it has a say in whether the step counts."""
        if self._counts_on_cuda:
            refuse_capture()
        if self.leaves.counters:
            self.leaves.set_step(step)
        self._owes_after_step = None
        if self._owed_here is None:
            average = yield from self._compressor.reduce(flat, self.state)
        else:
            average = yield from self._owed_here.reduce(flat, self._compressor, self.state, self.leaves)
            self._owes_after_step = DeviceFlag(self._owed_here.flat.any()) if self._any_rank_owes else None
        if average is not flat:
            flat.copy_(average)
        if watched:
            self.finite = DeviceFlag(all_finite(flat))
        return flat

    def held_back(self) -> dict[str, Tensor]:
        """Return the gradient that this rank has not given to an average yet, flat, by the same parameters on all ranks."""
        if not self.stateful:
            return {}
        zeros = torch.zeros(self.layout.numel, dtype=self.layout.dtype, device=self.layout.device)
        nothing = dict(zip(self.layout.names, zeros.split(self.layout.sizes), strict=True))
        return states.summed([nothing, self.leaves.held_back(), self._owed_by_name()])

    def _owed_by_name(self) -> dict[str, Tensor]:
        """Return what is carried over, flat, by parameter; while any rank may have some, of all parameters."""
        views = {} if self._owed_here is None else self.layout.views(self._owed_here.flat)
        return {name: view.reshape(-1) for name, view in views.items() if self._any_rank_owes or view.any()}

    @property
    def brought_out(self) -> bool:
        """True if the last step, if it counts, has carried nothing over; the same on all ranks."""
        return self.finite is not None and not self._owes_after_step

    def end_step(self, keep: bool, any_rank_owes: bool) -> bool:
        """End the step: keep what it changed, or undo it. `any_rank_owes`: whether any rank may still owe something.

        Return True if residuals from before the step were set to zero.
        """
        ended, owed, self.finite = self.finite is not None, self._owed_here, None
        keep = keep and ended
        lost = self.leaves.end_step(keep=keep)
        if ended:
            self._any_rank_owes = any_rank_owes
        if owed is not None:
            owed.keep() if keep else owed.undo()
            if keep and not (isinstance(owed, UnusedAverages) and (any_rank_owes or self.leaves.flat)):
                self._owed_here = None
        return lost

    def snapshot(self, *, keep: bool, undone: bool, any_rank_owes: bool) -> BucketMemory:
        """The memory before the last step, or with `keep` after it, to be saved by and by; copies pointers only.

        `undone`: see `Leaf.snapshot`. `any_rank_owes`: as for `end_step`, which neither this nor a save does.
        """
        snapshot, newest = copy.copy(self), keep and self.finite is not None
        snapshot.leaves = self.leaves.snapshot(newest=newest, undone=undone)
        snapshot._any_rank_owes = any_rank_owes
        if self._owed_here is not None:
            snapshot._owed_here = self._owed_here.snapshot(newest=newest, undone=undone)
        return snapshot

    def save(self) -> Entries:
        """Copies of all numbers of the state, by parameter name and field."""
        entries = self.leaves.save()
        for name, numbers in self._owed_by_name().items():
            entries.setdefault(name, {})[CARRIED_OVER] = numbers.clone()
        return entries

    def load(self, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take saved numbers; those that lost their place are carried to the next average."""
        self.carry_over(self.leaves.load(entries))
        self.carry_over({name: fields[CARRIED_OVER] for name, fields in entries.items() if CARRIED_OVER in fields})

    def rescale(self, factor: float) -> None:
        """Multiply what is held back."""
        self.leaves.rescale(factor)
        if self._owed_here is not None:
            self._owed_here.multiply(factor)

    def carry_over(self, held_back: Mapping[str, Tensor]) -> None:
        """Add to the next gradients, flat, by parameter name."""
        if held_back and self.layout.numel:
            self._owed_here = self._owed_here or CarriedOver(self.layout)
            self._owed_here.add(held_back)


def refuse_capture() -> None:
    """Raise RuntimeError while a CUDA graph is captured: what the host decides would be the same at each replay."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step of a compressor that counts its steps, or keeps residuals, cannot be captured in a CUDA graph: the host "
            "decides by the step's number and by the success of the step before. Capture steps of none, bf16 or fp16"
        )


class DeviceFlag:
    """A flag on its way from the device to the host; only reading it waits, and by the next step it has arrived."""

    def __init__(self, flag: Tensor) -> None:
        self.on_device, self._flag = flag, flag.to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if flag.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(flag.get_device()))

    def __bool__(self) -> bool:
        if self._arrived is not None:
            refuse_capture()
            self._arrived.synchronize()
        return bool(self._flag)
