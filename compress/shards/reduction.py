"""Gradients of sharded parameters: each rank gets the sum of its shard.

What FSDP and ZeRO-3 (Rajbhandari et al. 2020) send, as programs: quantised as in ZeRO++ (Wang et al. 2023), with error
feedback on the senders of gradients as in LoCo (Xie et al. 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from ...kernels import Residual, all_finite, temporary
from ..algorithms.adapters import Draws, drawn, draws
from ..algorithms.cuts import Cut, cut_shards, lengthened
from ..algorithms.payload import ALIGNMENT
from ..algorithms.zero_rows import ZeroRows
from ..builder.build import Spec, compressor, specification
from ..builder.optimizer_defaults import Optimizers, tuned
from ..composed.hierarchical import Hierarchical
from ..protocol.compressor import Codec, own_traits
from ..protocol.layout import Layout, Scope, working_dtype
from ..protocol.requests import AllToAll, Program
from ..state.leaf import WIDTHS, Entries, FlatLeaf, Narrow, Versions
from ..state.tensors import zeros
from .codec import codec_of, names_of_shards, needed
from .hosts import codec_inside, cut_inside, host_sums, shown, split_hosts, split_option
from .layout import ShardLayout


@dataclass
class ShardResidual(FlatLeaf):
    """Numbers of the rows of a layout, saved in the shapes of whole parameters. `store`: has as many rows."""

    layout: ShardLayout
    versions: Versions
    store: Narrow | None = None

    @classmethod
    def zeros(cls, layout: ShardLayout, bits: int = WIDTHS[0]) -> ShardResidual:
        """Nothing is held back yet; elements are kept in so many `bits`."""
        whole = layout.whole.widened()
        sizes = tuple(map(prod, layout.shapes))
        return cls(layout, *zeros(sizes, whole.dtype, whole.device, bits, len(layout.rows)))

    def save(self, field: str) -> Entries:
        return {name: {field: whole} for name, whole in self.layout.joined(self.wide()).items()}

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        numbers = self.layout.spread(self.wide())
        shapes = dict(zip(self.layout.whole.names, self.layout.whole.shapes, strict=True))
        for name, shape in shapes.items():
            saved = entries.get(name, {}).get(field)
            if saved is not None and tuple(saved.shape) != shape:
                raise ValueError(
                    f"the saved {field!r} of parameter {name!r} has shape {tuple(saved.shape)}, but {shape} is needed "
                    "here: load the state with the model that saved it"
                )
            if saved is not None:
                self.layout.cut(name, saved, numbers)
        self.set(self.kept(numbers))
        return {}

    def kept(self, every: Tensor) -> Tensor:
        """Return the rows that this rank keeps, given those of all ranks.

        Raises ValueError where there is anything in others: it would be lost.
        """
        mine = self.layout.kept(every)
        if mine is not every and int(mine.count_nonzero()) < int(every.count_nonzero()):
            raise ValueError(
                f"hosts of {self.layout.whole.ranks.per_host} ranks keep the residuals of fewer shards on a rank than there "
                "are: load the states of all ranks with resize=True; for a swap, swap(reduce='none') one step earlier"
            )
        return mine

    def held_back(self) -> dict[str, Tensor]:
        return {name: whole.view(-1) for name, whole in self.layout.joined(self.wide()).items()}


@dataclass
class Finite:
    """Flags that all gradients of a step were finite: `here` so far, and `everywhere`, on all ranks as far as known.

    Every payload carries what its sender knows, so after the last one all ranks know the same. None: nothing is known yet.
    """

    here: Tensor | None = None
    everywhere: Tensor | None = None

    def look(self, grad: Tensor) -> Tensor:
        """Take account of a gradient of this rank; whether it and all before were finite."""
        now = all_finite(grad)
        self.here = now if self.here is None else self.here & now
        return self.here

    def hear(self, told: Tensor) -> None:
        """Take account of what all ranks tell: 1 where all was finite."""
        now = told.all()
        self.everywhere = now if self.everywhere is None else self.everywhere & now


@dataclass
class ShardState:
    """The state of the gradients of a layout's parameters. `residual`: None without error feedback.

    `cut`: of the rows, `inside` of those that ranks of a host exchange. `zero_rows`: those of a shard, which stay zero by a
    bit of their own; None where the codec keeps zeros.
    """

    layout: ShardLayout
    residual: ShardResidual | None
    draws: Draws | None
    cut: Cut | None = None
    inside: Cut | None = None
    finite: Finite = field(default_factory=Finite)
    zero_rows: ZeroRows | None = None


@dataclass(frozen=True)
class ShardSum:
    """Each rank's shard of the mean gradient: one all-to-all, a sum in float32 on the rank whose shard it is.

    `codec`: what travels; None for the gradients as they are, which is still half of what Gloo's reduce-scatter sends.
    `feedback`: what part of that which a codec loses is added to the rank's next gradient, from 0 (none) to 1; until then it
    is kept in float32 or wider, or in so few `residual_bits`.

    `hosts`: the ranks of each host sum first. `inside` is the codec of that, and `codec` that of what travels between hosts.
    A rank then holds back of its place's rows alone, in units of one rank's gradient. `per_host`: as it was found.
    """

    codec: Codec | None = None
    feedback: float = 0.0
    residual_bits: int = 32
    hosts: Hierarchical | None = None
    inside: Codec | None = None
    per_host: int = field(default=1, repr=False)
    text: str = field(default="none", repr=False, compare=False)

    def __str__(self) -> str:
        """Return the text that builds it."""
        return self.text

    def placed(self, per_host: int, ranks: int) -> ShardSum:
        """Return the sum on hosts of so many ranks. On one host it is that inside of it."""
        if self.hosts is not None and per_host == ranks:
            return dataclasses.replace(self, codec=self.inside, feedback=0.0, per_host=1)
        return dataclasses.replace(self, per_host=per_host)

    def init(self, layout: ShardLayout) -> ShardState:
        """A zero residual for the shards of a layout, on hosts those of this rank's place."""
        layout = layout.on_hosts(self.per_host)
        residual = ShardResidual.zeros(layout, self.residual_bits) if self.feedback else None
        inside = cut_inside(self.inside, layout) if self.per_host > 1 else None
        if self.codec is None:
            return ShardState(layout, residual, None, inside=inside)
        place = layout.rows.index(layout.whole.ranks.rank)
        cut = cut_shards(self.codec, layout.spans, layout.row, place, layout.whole.device)
        shard = Layout(layout.whole.names, layout.shapes, layout.whole.dtype, layout.whole.device)
        zero_rows = None if own_traits(self.codec).keeps_zeros else ZeroRows.of_layout(shard)
        return ShardState(layout, residual, draws(self.codec, layout.whole), cut, inside, zero_rows=zero_rows)

    def reduce(self, grad: Tensor, state: ShardState, out: Tensor, scale: float = 1.0) -> Program[Tensor]:
        """`scale` times the mean over ranks of this rank's row of `grad`, (ranks * row,), in `out`, (row,).

        `grad` may be overwritten.
        """
        told = None if state.residual is None else state.finite.look(grad)
        scope: Scope = "all"
        wide = working_dtype(grad.dtype)
        if self.per_host > 1:
            given = [grad]
            del grad  # its memory is free while payloads travel
            grad, told = yield from host_sums(given.pop(), state.layout, self.inside, state.inside, told)
            scale, scope = scale / self.per_host, "across"
        if state.residual is not None and not self.feedback:
            grad = grad.to(wide).add_(state.residual.wide())  # of a codec before this one
            state.residual.clear()
        codec, cut = needed(self.codec, grad.dtype), state.cut
        if codec is None or cut is None:
            rows = grad.view(len(state.layout.rows), -1)
            received = yield from self._exchanged(rows, state, told, scope)
            total = received.sum(0, dtype=wide)
            out.copy_(total.mul_(scale / len(received)))
            return out
        payloads = self._encoded(grad.to(wide), state, told, cut)
        del grad  # its memory is free while payloads travel
        received = yield AllToAll(payloads, scope)
        if state.residual is not None:
            state.finite.hear(received[:, -1])
        mean = out.to(wide)
        _decoded(received, state.zero_rows, mean, cut)
        out.copy_(mean.mul_(scale) if scale != 1.0 else mean)
        return out

    def _exchanged(self, rows: Tensor, state: ShardState, told: Tensor | None, scope: Scope) -> Program[Tensor]:
        """The rows of all ranks; where a codec before has held back some of them, with word of whether the step counts."""
        if state.residual is None or told is None:
            return (yield AllToAll(rows, scope))
        received = yield AllToAll(torch.cat([rows, told.to(rows.dtype).expand(len(rows), 1)], 1), scope)
        state.finite.hear(received[:, -1] != 0)
        return received[:, :-1]

    def _encoded(self, grad: Tensor, state: ShardState, told: Tensor | None, cut: Cut) -> Tensor:
        """A payload for each rank: its row, encoded, and bits of its parameters' rows where the codec needs them.

        The last byte is `told`, 1 if all gradients so far were finite.
        """
        ranks, row, size = len(state.layout.rows), state.layout.row, cut.row_bytes
        zero_rows = state.zero_rows
        bits = 0 if zero_rows is None else zero_rows.row_bytes(1)
        payloads = temporary((ranks, size + bits + ALIGNMENT), dtype=torch.uint8, device=grad.device).zero_()
        if told is not None:
            payloads[:, -1] = told
        held = state.residual if self.feedback else None
        step = None if held is None else held.open()
        used, rows = None, None if zero_rows is None else zero_rows.repeated(ranks, row)
        if rows is not None:
            used = rows.used(grad, step, ranks)
            rows.packed(used, ranks, out=payloads[:, size : size + bits])
        encode_rows(grad, step, payloads[:, :size], cut, drawn(state.draws)[0] if state.draws else {})
        if held is not None and step is not None:
            if self.feedback < 1:
                step.after.mul_(self.feedback)
            if rows is not None and used is not None:
                rows.clear(used, step.after)
            if state.layout.padding:  # no checkpoint has it, and some codecs know no zero
                state.layout.clear_padding(step.after)
            held.close(step)
        return payloads


def _decoded(received: Tensor, zero_rows: ZeroRows | None, mean: Tensor, cut: Cut) -> None:
    """Write the mean of all ranks' payloads to `mean`; of a row that is zero on a rank, zeros of that rank."""
    size = cut.row_bytes
    if zero_rows is None:
        return cut.decode_own(received[:, :size].unsqueeze(1), mean)
    stride = cut.length if cut.own is None else mean.numel()
    parts = temporary((len(received) * stride,), dtype=mean.dtype, device=mean.device)
    cut.repeated(len(received), stride).decode(received[:, :size].unsqueeze(0), parts)
    rows = zero_rows.repeated(len(received), stride)
    rows.clear(rows.unpacked(received[:, size : size + zero_rows.row_bytes(1)]), parts)
    torch.mean(parts.view(len(received), stride)[:, : mean.numel()], 0, out=mean)


def encode_rows(grad: Tensor, residual: Residual | None, codes: Tensor, cut: Cut, random: dict[str, int]) -> None:
    """Encode equal rows of `grad` (+ `residual`), flat, to `codes`, (rows, bytes).

    Without places there are zeros behind each row, up to its length. `random`: the key and the counter of a codec that
    draws, else nothing.
    """
    rows, length = len(codes), cut.length
    if cut.rows is not None or grad.numel() == rows * length:
        cut.encode(grad, residual, codes, **random)
    elif residual is None:
        cut.encode(lengthened(grad, rows, length), None, codes, **random)
    else:
        kept = lengthened(residual.before, rows, length)
        cut.encode(lengthened(grad, rows, length), Residual(kept, kept), codes, **random)
        residual.after.view(rows, -1).copy_(kept.view(rows, length)[:, : grad.numel() // rows])


@names_of_shards()
def shard_sum(spec: Spec, optimizer: Optimizers | None = None) -> ShardSum:
    """Build the sum of shards by a specification: `none`, or a method whose first round is an all-to-all.

    `hosts+` before it has hosts sum first; its option `inside` is what travels there. `optimizer`: see `tuned`. Raises
    ValueError for others.
    """
    inside, given = split_option(spec, "inside")
    hosts, inner = split_hosts(given)
    if inside is not None and hosts is None:
        raise ValueError(f"inside is an option of hosts, as in hosts:inside=int8+int4; got {spec!r}")
    built = compressor(tuned(inner, optimizer))
    text = shown(hosts, inside, specification(built))
    return ShardSum(*codec_of(built, spec), hosts, codec_inside(inside), text=text)
