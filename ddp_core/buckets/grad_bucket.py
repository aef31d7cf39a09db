"""Buckets: the gradients of some parameters as one flat buffer, how they lie in it, and their way there and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version  # a graph that needs what was there before will notice

from ...compress import Layout, Ranks
from ...kernels import gather_scaled
from ...kernels.casting import LARGE
from ..transport.protocol import Pending
from .protocol import FlatBucket

GRADIENT = attrgetter("grad")


def plain(name: str) -> str:
    """A parameter's name without what torch.compile puts into it.

    >>> plain("_orig_mod.encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """{name: plain name} of a model's parameters; those that would share a plain name keep their own.

    >>> plain_names(["weight", "_orig_mod.weight", "_orig_mod.bias"])
    {'weight': 'weight', '_orig_mod.weight': '_orig_mod.weight', '_orig_mod.bias': 'bias'}
    """
    names = list(names)
    shared = Counter(map(plain, names))
    return {name: name if shared[plain(name)] > 1 else plain(name) for name in names}


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients: its own, or what `parameter.grad_dtype` says, where torch has that."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype


def grad_bytes(parameter: Tensor) -> int:
    """The bytes of a parameter's gradient."""
    return parameter.numel() * grad_dtype(parameter).itemsize


def is_packed(parameter: Tensor) -> bool:
    """Return True if its elements lie one behind the other in some order of its axes, without gaps or overlaps."""
    return parameter.permute(memory_order(parameter)).is_contiguous()


def memory_order(parameter: Tensor) -> list[int]:
    """The axes of a parameter, that of the largest stride first. One with one element, whose stride says nothing, stays."""
    axes = range(parameter.dim())
    by_stride = iter(sorted((axis for axis in axes if parameter.size(axis) != 1), key=parameter.stride, reverse=True))
    return [axis if parameter.size(axis) == 1 else next(by_stride) for axis in axes]


def laid_out(parameter: Tensor) -> Sequence[int]:
    """The axes of a parameter in the order in which a bucket lays them out; as contiguous where it has gaps or overlaps."""
    return memory_order(parameter) if is_packed(parameter) else range(parameter.dim())


def axis_order(parameter: Tensor) -> list[int]:
    """The axes with more than one element, in the order in which a bucket lays them out."""
    return [axis for axis in laid_out(parameter) if parameter.size(axis) > 1]


def memory_shape(parameter: Tensor) -> tuple[int, ...]:
    """The sizes of a parameter in memory order, as DDP lays its gradient out; complex numbers add an axis of 2.

    A channels-last (out, in, k, k) lies as (out, k, k, in).
    """
    shape = tuple(parameter.size(axis) for axis in laid_out(parameter))
    return (*shape, 2) if parameter.is_complex() else shape


def layout_of(named: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, ranks: Ranks) -> Layout:
    """The layout of a bucket with these parameters, in order."""
    shapes = tuple(memory_shape(parameter) for parameter in named.values())
    return Layout(tuple(named), shapes, dtype, device, ranks)


def as_real(buffer: Tensor) -> Tensor:
    """A bucket's buffer as flat real numbers, sharing memory.

    Raises TypeError for sparse gradients.
    """
    if buffer.is_sparse:
        raise TypeError(
            "sparse gradients cannot be compressed: use sparse=False or gradwire.DistributedDataParallel, or leave it out "
            "with _ddp_params_and_buffers_to_ignore"
        )
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def as_numbers(buffer: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """A bucket's buffer with a number for each of its parameters'; torch gives real ones for complex ones, two for each."""
    halved = not buffer.is_complex() and any(each.is_complex() for each in parameters)
    return torch.view_as_complex(buffer.view(-1, 2)) if halved else buffer


def undifferentiated(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function of which no graph is to be made, even in a backward with create_graph."""
    if torch.is_grad_enabled():
        with torch.no_grad():  # entering it is dear
            function(*arguments)
    else:
        function(*arguments)


class GradBucket(FlatBucket):
    """A bucket of the reducer. A communication hook finds in it all that it knows of torch's `dist.GradBucket`.

    `number`: its place among the buckets, which may be sent in another order. `members`: the parameters' indices in the
    model. `all_parameters`: of all members, whether they are sent in this step or not. `flat`: all gradients, one behind
    the other. `waiting`: of how many one is still missing. `scale`: what they are multiplied by on their way in. `pending`:
    its average, where it is on its way. `absent`: members that had no gradient when it was filled. `plan`: for whoever
    averages it to remember how. `memory`: of the buffer; None is memory of its own. With `alias`, gradients become
    views of the buffer: nothing is copied back.
    """

    slices: Sequence[Any] = ()  # see CutBucket

    def __init__(
        self,
        index: int,
        members: Sequence[int],
        parameters: Sequence[Tensor],
        *,
        last: bool,
        alias: bool,
        memory: Tensor | None = None,
    ) -> None:
        self.members = tuple(members)
        self.number = self.place = index
        self._last, self._alias = last, alias
        self.all_parameters = list(parameters)
        self._sizes = [parameter.numel() for parameter in parameters]
        dtype, device = grad_dtype(parameters[0]), parameters[0].device
        self._memory = torch.zeros(sum(self._sizes), dtype=dtype, device=device) if memory is None else memory
        self.flat = self._memory
        self._views = [view.data for view in as_views(self._memory, self.all_parameters)]  # each counts its own changes
        self._places = {member: place for place, member in enumerate(self.members)}
        parameters_of = zip(self.members, self.all_parameters, strict=True)
        self.large = {member for member, each in parameters_of if not each.is_cuda and grad_bytes(each) >= LARGE}
        self._starts = list(accumulate(self._sizes, initial=0))[:-1]
        self._gathers = [view.is_cuda or view.is_contiguous() for view in self._views]  # together with others
        self.plan: Any = None
        self.open(1.0)

    def set_buffer(self, tensor: Tensor) -> None:
        """Let a hook work on another tensor of as many elements."""
        if tensor.numel() != self.flat.numel():
            raise ValueError(f"a bucket of {self.flat.numel()} elements cannot hold {tensor.numel()}")
        self.flat = tensor

    def gradients(self) -> list[Tensor]:
        """Each parameter's part of the buffer, in its shape."""
        return as_views(self.flat, self.parameters())

    @property
    def views(self) -> list[Tensor]:
        """Each member's part of the buffer, in its shape, as it lay in memory when the bucket was made."""
        return self._views

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of the buffer."""
        return self.all_parameters if self._sent is None else [self.all_parameters[place] for place in self._sent]

    def is_last(self) -> bool:
        """Return True if it is sent last."""
        return self._last

    def open(self, scale: float) -> None:
        """Make ready for a step's gradients."""
        self.scale = scale
        self.pending: Pending | None = None
        self.absent: list[int] = []
        self.flat = self._memory
        self._filled = bytearray(len(self.members))
        self._sent: list[int] | None = None  # places of the members that are sent, where these are not all

    def copy(self, index: int) -> None:
        """Copy the gradient of a member alone, while it is in the cache; then its memory is free again."""
        place = self._places[index]
        parameter, view = self.all_parameters[place], self._views[place]
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
        parameter = self.all_parameters[place]
        if parameter.grad is self._views[place]:
            parameter.grad = self._views[place].clone()

    def fill(self, used: Sequence[int]) -> None:
        """Bring in the gradients that are not there yet, together; zeros stand for those that are missing.

        `used`: by index, 0 for parameters that maybe no rank used. What those have gathered before takes part. Not to be
        differentiated.
        """
        outside, sources, targets, starts = list[int](), list[Tensor](), list[Tensor](), list[int]()
        inside, empty = list[Tensor](), list[Tensor]()
        for place in range(len(self.members)) if self._sent is None else self._sent:
            if self._filled[place]:
                continue
            grad, view = self.all_parameters[place].grad, self._views[place]
            if grad is None:
                empty.append(view)
                self.absent.append(self.members[place])
            elif grad is view:
                inside.append(view)
                if not used[self.members[place]]:
                    self._release(place)
            else:
                outside.append(place)
                if self._gathers[place]:
                    sources.append(grad)
                    targets.append(view)
                    starts.append(self._starts[place])
                else:
                    self._move(grad, view)
        if self._memory.is_cuda and sources:  # then scaled together with those that are there
            torch._foreach_copy_(targets, sources)
            inside += targets
        elif sources:
            gather_scaled(self._memory, sources, starts, self.scale)
            increment_version(targets)
        if empty:
            torch._foreach_zero_(empty)
        if inside and self.scale != 1.0:
            self._scale(inside, all_there=len(inside) + len(empty) == len(self.members))
        if self._alias:
            for place in outside:
                if used[self.members[place]]:
                    self.all_parameters[place].grad = self._views[place]
        if self._sent is not None:
            self.flat = torch.cat(self._pieces(self._sent))

    def _scale(self, inside: list[Tensor], *, all_there: bool) -> None:
        if all_there:  # the others are zeros
            self._memory.mul_(self.scale)
        else:  # in place it rounds the factor to 16 bits
            torch._foreach_copy_(inside, torch._foreach_mul(inside, self.scale))

    def sparse_members(self) -> list[int]:
        """The members whose gradients are sparse, which do not fit in here."""
        grads = zip(self.members, map(GRADIENT, self.all_parameters), strict=True)
        return [member for member, grad in grads if grad is not None and grad.is_sparse]

    def _pieces(self, places: Sequence[int]) -> list[Tensor]:
        pieces = self._memory.split(self._sizes)
        return [pieces[place] for place in places]

    def clear(self) -> None:
        """Zeros, for a rank that has no gradients to give."""
        self._memory.zero_()
        self.flat = self._memory if self._sent is None else torch.cat(self._pieces(self._sent))

    def _take(self, average: Tensor) -> None:
        """Write an average that lies elsewhere into the buffer. Hooks may hand back complex numbers as pairs."""
        if self._sent is None and average.data_ptr() == self._memory.data_ptr():
            return
        if self._memory.is_complex() and not average.is_complex():
            average = torch.view_as_complex(average.view(-1, 2))
        pieces = [self._memory] if self._sent is None else self._pieces(self._sent)
        torch._foreach_copy_(pieces, list(average.view(-1).split([piece.numel() for piece in pieces])))

    def deliver(self, average: Tensor, used: Sequence[int] | None) -> None:
        """Make the average the gradient of the parameters that any rank used: by index, not 0; None stands for all.

        Not to be differentiated.
        """
        if average is not self._memory:
            self._take(average)
        if self._alias and all(map(is_, map(GRADIENT, self.all_parameters), self._views)):
            return
        grads, views = [], []
        for place in range(len(self.members)) if self._sent is None else self._sent:
            member, parameter, view = self.members[place], self.all_parameters[place], self._views[place]
            grad = parameter.grad
            if grad is view or (used is not None and not used[member]):
                continue
            if self._alias:
                parameter.grad = view
            elif grad is None or grad.is_conj() or grad.is_neg():  # lazy views cannot be written to with others at once
                parameter.grad = view.clone()
            else:
                grads.append(grad)
                views.append(view)
        if grads:
            kept = torch.autograd._unsafe_preserve_version_counter(tuple(grads))
            with kept:  # others may look at theirs, and share it
                torch._foreach_copy_(grads, views)

    def lend(self, average: Tensor) -> None:
        """Let the gradients be views of the average for a while, with nothing copied: whoever asks for it clears them."""
        if average is not self._memory:
            self._take(average)
        for parameter, view in zip(self.all_parameters, self._views, strict=True):
            parameter.grad = view


def as_views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Each parameter's part of a buffer in its shape, and in its strides where these have no gaps."""
    pieces = as_numbers(flat, parameters).split([parameter.numel() for parameter in parameters])
    return [
        piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
        if is_packed(parameter)
        else piece.view(parameter.shape)
        for piece, parameter in zip(pieces, parameters, strict=True)
    ]
