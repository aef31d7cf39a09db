"""The memory of a compressor for a bucket, or for a slice of one."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...compress.builder.build import specification
from ...compress.protocol.compressor import Compressor
from ...compress.protocol.layout import Layout, working_dtype
from ...compress.protocol.requests import Program, all_reduce, together
from ...compress.state import tree as states
from ...compress.state.gauge import gauges
from ...compress.state.shares import ranks_given
from ...compress.state.tree import Entries, Leaves, PerParameter
from ...kernels import Residual, all_finite
from .out_of_memory import allocated, kept_bytes

CARRIED_OVER = "carried_over"  # the field under which a state dict keeps gradient that has lost its place


class BucketMemory:
    """The compressor state of what is sent at once, with every step a transaction.

    A step whose average is not finite on any bucket is one that GradScaler skips: its changes to the state are undone. That
    takes a second copy of the state. Without `undo`, only what ranks share has one, which is small; residuals and momenta
    are overwritten in place, and a step that is undone leaves zeros of those that it has overwritten.
    With `partial`, some steps may leave parameters out on all ranks: what would be averaged for those is kept for later,
    since DDP drops it. `carrying`: some rank may be given something to owe; the same on all ranks.
    """

    def __init__(
        self,
        compressor: Compressor,
        layout: Layout,
        step: int,
        *,
        partial: bool = False,
        carrying: bool = False,
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
        self._carrying, self._remembers = carrying, bool(self.leaves.flat)
        self._carried: PerParameter | None = None  # gradient outside the compressor's state
        self._asks = partial and (self._remembers or carrying)  # which parameters any rank has used
        if self._asks:
            self._carried = _versioned(layout)
            self._sizes = torch.tensor(layout.sizes, device=layout.device)
        self._finite: DeviceFlag | None = None
        self._left: DeviceFlag | None = None  # whether anything is carried after a step, asked while something may be

    @property
    def stateful(self) -> bool:
        """True if a step changes anything that may have to be undone."""
        return self._remembers or self._carried is not None or self._carrying

    def reduce(self, flat: Tensor, step: int, watched: bool) -> Program[Tensor]:
        """Average the bucket over ranks, in place of `flat`. `watched`: it has a say in whether the step counts."""
        if self._counts_on_cuda:
            refuse_capture()
        if self.leaves.counters:
            self.leaves.set_step(step)
        used = self._used(flat) if self._asks else None
        rest = None if self._carried is None else self._bring_out(flat, self._carried)
        if used is not None:
            average = yield from self._reduce_used(flat, used, rest)
        else:
            average = yield from self._compressor.reduce(flat, self.state, rest)
        if average is not flat:
            flat.copy_(average)
        if watched:
            self._left = DeviceFlag(self._carried.flat.any()) if self._carrying and self._carried is not None else None
            self._finite = DeviceFlag(all_finite(flat))
        return flat

    def _bring_out(self, flat: Tensor, carried: PerParameter) -> Residual | None:
        """Add what is carried to this rank's gradient; what 16 bits cannot hold of the sum stays held back.

        Where ranks of a host share what is held back, that goes beside the gradient into the host's sum.
        """
        exact = flat.to(working_dtype(flat.dtype)).add_(carried.flat)
        if exact is not flat:
            flat.copy_(exact)
        if not self._asks:
            carried.clear()
        if exact is flat:
            return None
        rest = exact.sub_(flat)
        self.leaves.hold(self.layout, rest)
        return Residual(rest, rest) if self.leaves.residuals and ranks_given(self._compressor) is not None else None

    def _used(self, flat: Tensor) -> Tensor:
        """1 for each parameter with a gradient on this rank, 0 for those whose gradient is all zeros."""
        pieces = flat.split(self.layout.sizes)
        if flat.is_cuda and all(self.layout.sizes):  # one kernel, not one for each parameter
            return torch.stack(torch._foreach_norm(pieces, math.inf)).ne(0).float()
        return torch.stack([piece.any() for piece in pieces]).float()

    def _reduce_used(self, flat: Tensor, used: Tensor, rest: Residual | None) -> Program[Tensor]:
        """The average of the parameters that any rank used; that of the others stays here. `rest`: of `_bring_out`."""
        averaging = self._compressor.reduce(flat, self.state, rest)
        results: list[Tensor] = yield from together(averaging, all_reduce(used))
        average, shares = results
        unused = (shares == 0).repeat_interleave(self._sizes, output_size=self.layout.numel)
        assert self._carried is not None
        self._carried.update().after.copy_(torch.where(unused, average, 0))
        return average.masked_fill_(unused, 0)

    def held_back(self) -> dict[str, Tensor]:
        """Return the gradient that this rank has not given to an average yet, flat, by the same parameters on all ranks."""
        if not self.stateful:
            return {}
        zeros = torch.zeros(self.layout.numel, dtype=self.layout.dtype, device=self.layout.device)
        nothing = dict(zip(self.layout.names, zeros.split(self.layout.sizes), strict=True))
        return states.summed([nothing, self.leaves.held_back(), self._carried_by_name()])

    def _carried_by_name(self) -> dict[str, Tensor]:
        views = {} if self._carried is None else self.layout.views(self._carried.flat)
        return {name: view.reshape(-1) for name, view in views.items() if self._carrying or view.any()}

    def finite(self) -> bool:
        """Return True if the last average was finite."""
        return self._finite is None or bool(self._finite)

    @property
    def brought_out(self) -> bool:
        """True if the last step, if it counts, has carried nothing over; the same on all ranks."""
        return self._finite is not None and not self._left

    def end_step(self, keep: bool, carrying: bool) -> bool:
        """End the step: keep what it changed, or undo it. `carrying`: whether any rank may still owe something.

        Return True if that was not possible, and what was held back before the step is gone.
        """
        ended = self._finite is not None
        self._finite = None
        lost = not (ended and keep) and self.leaves.overwrites
        for leaves in (self.leaves, self._carried):
            if leaves is not None:
                leaves.keep() if ended and keep else leaves.undo()
        if not ended:
            return lost
        self._carrying, self._asks = carrying, self._asks and (carrying or self._remembers)
        if keep and not self._asks:
            self._carried = None
        return lost

    def snapshot(self, *, keep: bool, carrying: bool) -> BucketMemory:
        """The memory before the last step, or with `keep` after it, to be saved by and by; copies pointers only.

        `carrying`: as for `end_step`, which neither this nor a save does.
        """
        snapshot, newest = copy.copy(self), keep and self._finite is not None
        snapshot.leaves, snapshot._carrying = self.leaves.snapshot(newest=newest), carrying
        snapshot._carried = None if self._carried is None else self._carried.snapshot(newest=newest)
        return snapshot

    def save(self) -> Entries:
        """Copies of all numbers of the state, by parameter name and field."""
        entries = self.leaves.save()
        for name, numbers in self._carried_by_name().items():
            entries.setdefault(name, {})[CARRIED_OVER] = numbers.clone()
        return entries

    def load(self, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take saved numbers; those that lost their place are carried to the next average."""
        self.carry_over(self.leaves.load(entries))
        self.carry_over({name: fields[CARRIED_OVER] for name, fields in entries.items() if CARRIED_OVER in fields})

    def rescale(self, factor: float) -> None:
        """Multiply what is held back."""
        self.leaves.rescale(factor)
        if self._carried is not None:
            self._carried.multiply(factor)

    def carry_over(self, held_back: Mapping[str, Tensor]) -> None:
        """Add to the next gradients, flat, by parameter name."""
        if not held_back:
            return
        carried = _versioned(self.layout.widened())  # a new one: somebody may have taken the old one
        if self._carried is not None:
            carried.flat.copy_(self._carried.flat)
        views = self.layout.views(carried.flat)
        for name, numbers in held_back.items():
            views[name].view(-1).add_(numbers.to(self.layout.device))
        self._carried = carried


def _versioned(layout: Layout) -> PerParameter:
    zeros = PerParameter.zeros(layout, residual=True)
    zeros.versioned = True
    return zeros


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
        self._flag = flag.to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if flag.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(flag.get_device()))

    def __bool__(self) -> bool:
        if self._arrived is not None:
            refuse_capture()
            self._arrived.synchronize()
        return bool(self._flag)
