"""The gradients of some parameters as one flat buffer, on their way to the process group and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ..kernels import gather_scaled
from .parameters import is_packed

VERSION = attrgetter("_version")  # of a tensor: how often it was changed in place
LARGE = 1 << 15  # bytes; copying smaller gradients one by one costs more than it saves


Slot: TypeAlias = tuple[
    int, Tensor, Tensor, "int | None"
]  # member, parameter, view, and its first element if it is large


class Awaited(Protocol):
    """What is on its way: a future, or less."""

    def wait(self) -> Tensor:
        """The result when it is there; raises RuntimeError where it does not come."""


class GradBucket:
    """A bucket of the reducer. A communication hook finds in it all that it knows of torch's `dist.GradBucket`.

    `members`: the parameters' indices in the model. `waiting`: of how many the gradient is still missing. `scale`: what
    gradients are multiplied by on their way in. With `alias`, gradients become views of the buffer, so that nothing is
    copied back.
    """

    def __init__(
        self, index: int, members: Sequence[int], parameters: Sequence[Tensor], *, last: bool, alias: bool
    ) -> None:
        self.members = tuple(members)
        self._index, self._last, self._alias = index, last, alias
        self._parameters = list(parameters)
        self._sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self._flat: Tensor = torch.zeros(sum(self._sizes), dtype=first.dtype, device=first.device)
        self._buffer = self._flat
        self._views = [view.data for view in _views(self._flat, self._parameters)]  # each counts its own changes
        self._places = {member: place for place, member in enumerate(self.members)}
        self._large = [not p.is_cuda and p.nbytes >= LARGE for p in self._parameters]
        starts = accumulate(self._sizes, initial=0)
        slots = zip(self.members, self._parameters, self._views, starts, self._large, strict=False)
        self._slots: list[Slot] = [
            (member, parameter, view, start if large and view.is_contiguous() else None)
            for member, parameter, view, start, large in slots
        ]
        self.open(1.0)

    def index(self) -> int:
        """Its place in the order sent."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients, flat."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Let a hook work on another tensor of as many elements."""
        if tensor.numel() != self._buffer.numel():
            raise ValueError(f"a bucket of {self._buffer.numel()} elements cannot hold {tensor.numel()}")
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Each parameter's part of the buffer, in its shape."""
        return _views(self._buffer, self.parameters())

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of the buffer."""
        return self._parameters if self._sent is None else [self._parameters[place] for place in self._sent]

    def is_last(self) -> bool:
        """Whether it is sent last."""
        return self._last

    def open(self, scale: float, asleep: Collection[int] = ()) -> None:
        """Make ready for a step's gradients. `asleep`: those that nothing tells of."""
        self.scale = scale
        self.waiting = len(self.members) - len(asleep)
        self.average: Awaited | None = None
        self._buffer = self._flat
        self._filled = bytearray(len(self.members))
        self._sent: list[int] | None = None  # places of the members that are sent, where these are not all
        self._asleep = asleep
        self._unheard: list[int] = []  # of these, the members that have been copied,
        self._copied: list[Tensor] = []  # their gradients,
        self._versions: list[int] = []  # and how often these had been changed before

    def bring(self, index: int) -> None:
        """A gradient is ready. A large one is copied at once, while it is in the cache, and its memory is free again."""
        self.waiting -= 1
        place = self._places[index]
        if self._large[place] and self.waiting:  # the last one is copied with all that are left
            if torch.is_grad_enabled():  # create_graph; entering no_grad is dear for every gradient
                with torch.no_grad():
                    self._copy(place)
            else:
                self._copy(place)

    def skip(self) -> None:
        """One gradient will not come."""
        self.waiting -= 1

    def _copy(self, place: int) -> None:
        _, parameter, view, *_ = self._slots[place]
        grad = parameter.grad
        if grad is None or grad.is_sparse:  # a sparse one is refused with the bucket
            return
        self._move(grad, view)
        if self._alias:
            parameter.grad = view
        self._filled[place] = 1

    def _move(self, grad: Tensor, view: Tensor) -> None:
        if self.scale != 1.0:
            torch.mul(grad, self.scale, out=view)
        elif grad is not view:
            view.copy_(grad)

    def leave_out(self, members: Sequence[int]) -> None:
        """Some members, which no rank used, are not sent; their gradients stay as they are.

        Only a plain sum can be of fewer elements: compressors are given zeros, since their state is of whole buckets.
        """
        places = {self._places[member] for member in members}
        if self.scale != 1.0:
            self._sent = [place for place in range(len(self.members)) if place not in places]
            return
        for place in places:
            self._release(place)
            self._views[place].zero_()
            self._filled[place] = 1

    def _release(self, place: int) -> None:
        """Let a gradient that lies in the buffer have memory of its own: the buffer's is needed."""
        parameter = self._parameters[place]
        if parameter.grad is self._views[place]:
            parameter.grad = self._views[place].clone()

    def fill(self, used: Sequence[int]) -> None:
        """Bring in the gradients that are not there yet, together; zeros stand for those that are missing.

        `used`: by index, 0 for parameters that maybe no rank used. What those have gathered before takes part. Not to be
        differentiated.
        """
        sources, targets, inside, empty, placed = [], [], [], [], []
        large, rooms, starts = [], [], []
        filled, slots, asleep, alias = self._filled, self._slots, self._asleep, self._alias  # there may be thousands
        for place in range(len(slots)) if self._sent is None else self._sent:
            if filled[place]:
                continue
            member, parameter, view, start = slots[place]
            if (grad := parameter.grad) is None:
                empty.append(view)
                continue
            if grad is view:
                inside.append(view)
                if not used[member]:
                    self._release(place)
                continue
            if start is not None:
                large.append(grad)
                rooms.append(view)
                starts.append(start)
            elif self._large[place]:
                self._move(grad, view)
            else:
                sources.append(grad)
                targets.append(view)
            if alias and used[member]:
                placed.append((parameter, view))
            if member in asleep:
                self._unheard.append(member)
                self._copied.append(view if alias else grad)
        if large:
            gather_scaled(self._flat, large, starts, self.scale)
            torch.autograd.graph.increment_version(rooms)  # a graph that needs what was there before will notice
        self._write(sources, targets, inside, empty)
        for parameter, view in placed:
            parameter.grad = view
        self._versions = list(map(VERSION, self._copied))
        if self._sent is not None:
            self._buffer = torch.cat(self._pieces(self._sent))

    def _write(self, sources: list[Tensor], targets: list[Tensor], inside: list[Tensor], empty: list[Tensor]) -> None:
        """Copy, clear and scale parts of the buffer, with as few calls as these take."""
        if sources:
            torch._foreach_copy_(targets, sources)
        if empty:
            torch._foreach_zero_(empty)
        if (scaled := targets + inside) and self.scale != 1.0:
            if len(scaled) + len(empty) == len(self.members):
                self._flat.mul_(self.scale)
            else:
                torch._foreach_mul_(scaled, self.scale)

    def _pieces(self, places: Sequence[int]) -> list[Tensor]:
        pieces = self._flat.split(self._sizes)
        return [pieces[place] for place in places]

    def clear(self) -> None:
        """Zeros, for a rank that has no gradients to give."""
        self._flat.zero_()
        self._buffer = self._flat if self._sent is None else torch.cat(self._pieces(self._sent))

    def _take(self, average: Tensor) -> None:
        """Write an average that lies elsewhere into the buffer. Hooks may hand back complex numbers as pairs."""
        if self._sent is None and average.data_ptr() == self._flat.data_ptr():
            return
        if self._flat.is_complex() and not average.is_complex():
            average = torch.view_as_complex(average.view(-1, 2))
        pieces = [self._flat] if self._sent is None else self._pieces(self._sent)
        torch._foreach_copy_(pieces, list(average.view(-1).split([piece.numel() for piece in pieces])))

    def disturbed(self) -> int | None:
        """A member that was told of by nothing and got another gradient after its own had left, if there is one.

        A gradient of its own that shares its memory with others, as parts of one tensor do, counts all changes there: it
        is not asked.
        """
        now = list(map(VERSION, self._copied))
        if now == self._versions:
            return None
        for member, grad, version, before in zip(self._unheard, self._copied, now, self._versions, strict=True):
            if version != before and (self._alias or grad.untyped_storage().nbytes() == grad.nbytes):
                return member
        return None

    def deliver(self, average: Tensor, used: Sequence[int] | None) -> None:
        """Make the average the gradient of the parameters that any rank used: by index, not 0; None stands for all.

        Not to be differentiated.
        """
        self._take(average)
        self._unheard, self._copied, self._versions = [], [], []
        grads, views = [], []
        slots = self._slots if self._sent is None else [self._slots[place] for place in self._sent]
        for member, parameter, view, *_ in slots:
            grad = parameter.grad
            if grad is view or (used is not None and not used[member]):
                continue
            if self._alias:
                parameter.grad = view
            elif grad is None:
                parameter.grad = view.clone()
            else:
                grads.append(grad)
                views.append(view)
        if grads:
            with torch.autograd._unsafe_preserve_version_counter(
                tuple(grads)
            ):  # others may look at theirs, and share it
                torch._foreach_copy_(grads, views)


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Each parameter's part of a buffer in its shape, and in its strides where these have no gaps."""
    pieces = flat.split([parameter.numel() for parameter in parameters])
    return [
        piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
        if is_packed(parameter)
        else piece.view(parameter.shape)
        for piece, parameter in zip(pieces, parameters, strict=True)
    ]


Average: TypeAlias = Callable[[GradBucket], Awaited]  # what a reducer sends buckets through
