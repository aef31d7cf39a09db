"""The same model on all ranks: a check before training, and copies of parameters and buffers of one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compress import Spec, compressor, specification
from ...compress.builder.build import fingerprint
from ..transport.protocol import Transport
from ..transport.rank_messages import alike, broadcast, exchange, largest, same, shown
from .unused_parameters import Rules


def described(parameters: Mapping[str, Tensor], spec: Spec, rules: Rules) -> list[str]:
    """Return what ranks must agree on, a line each: the compressor and other arguments, then the parameters."""
    built = compressor(spec)
    of_compressor = alike(fingerprint(built), f"the compressor {specification(built)}")
    return [of_compressor, *rules.shared(), *described_parameters(parameters)]


def described_parameters(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return what ranks must agree on of parameters, a line each."""
    return [
        f"parameter {name} with shape {tuple(p.shape)}, strides {p.stride()}, {p.dtype} on {p.device.type}, "
        f"requires_grad={p.requires_grad}"
        for name, p in parameters.items()
    ]


def verify(lines: Sequence[str], transport: Transport) -> None:
    """Raise RuntimeError on every rank, naming the first difference and the ranks, unless all have the same lines."""
    forms = ("\n".join(line.split("\0")[form] for line in lines) for form in (0, -1))
    digest = alike(*(hashlib.sha256(form.encode()).hexdigest() for form in forms))
    digests = exchange(digest, transport, what="the models that they train")
    differing = [rank for rank, other in enumerate(digests) if not same(other, digests[0])]
    if not differing:
        return
    texts = exchange("\n".join(lines), transport, what="the models that they train")
    mine, other = texts[0].split("\n"), texts[differing[0]].split("\n")
    here, there = next(
        (tuple(map(shown, pair)) for pair in zip(mine, other, strict=False) if not same(*pair)),
        tuple(f"{sum(line.startswith('parameter ') for line in lines)} parameters" for lines in (mine, other)),
    )
    raise RuntimeError(
        f"DDP expects same model across all ranks, but rank 0 has {here}, while rank {differing[0]} has {there}"
        + (f"; in all, ranks {differing} differ from rank 0" if len(differing) > 1 else "")
    )


class BufferSync:
    """Copies a model's buffers from one rank to all, or does what a user's hook does instead.

    `hook`: its state, the function, and whether it runs after forward. It is called as `function(state, {name: buffer})`;
    the futures that it returns, if any, are waited for at the end of backward.
    """

    def __init__(
        self, transport: Transport, hook: tuple[Any, Callable[[Any, dict[str, Tensor]], Any], bool] | None = None
    ) -> None:
        self.hook = hook
        self._transport = transport
        self._pending: list[torch.futures.Future[Any]] = []

    def separate(self) -> None:
        """Have buffers queue behind no gradients. A collective call."""
        self._transport = self._transport.separate()

    @property
    def after_forward(self) -> bool:
        """True if buffers are synchronized after forward instead of before it."""
        return self.hook is not None and self.hook[2]

    def run(self, buffers: dict[str, Tensor], *, agree: bool, candidate: bool) -> None:
        """Synchronize: from rank 0, or with `agree` from the highest rank that is a candidate."""
        if self.hook is not None:
            state, function, _ = self.hook
            self._pending += function(state, buffers) or []
            return
        tensors = list(buffers.values())
        self.copy(tensors, agreed_rank(candidate, self._transport) if agree else 0)

    def copy(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite tensors by those of rank `source` of the group; graphs that saved them stay valid."""
        changed = tuple(tensor.detach() for tensor in tensors if tensor.numel())
        if changed:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(changed):
                broadcast(changed, source, self._transport, what="their parameters and buffers")

    def wait(self) -> None:
        """End what hooks began."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.wait()


def agreed_rank(candidate: bool, transport: Transport) -> int:
    """The highest rank that is a candidate. Blocks."""
    rank = largest(transport.ranks.rank if candidate else -1, transport)
    if rank < 0:
        raise RuntimeError("no rank has the current model: all have run out of inputs at once")
    return rank
