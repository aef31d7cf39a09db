"""Weights that are gathered from shards: as they are, encoded, or as differences to what all ranks already hold.

Differences: Jia et al. 2024, SDP4Bit. What a codec loses of one stays in the next one, so nothing is carried over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels import temporary
from ..algorithms.cuts import Cut, cut_shards, lengthened
from ..algorithms.payload import ALIGNMENT
from ..builder.build import Spec, compressor, specification
from ..composed.hierarchical import Hierarchical
from ..protocol.compressor import Codec, own_traits
from ..protocol.layout import working_dtype
from ..protocol.requests import AllGather, Program, together
from ..state.leaf import WIDTHS, Entries, FlatLeaf, Versions
from .codec import codec_of, names_of_shards, needed
from .hosts import gathered_rows, shown, split_hosts, split_option
from .layout import ShardLayout

FAR = 4  # times the change of a step: what no step brings
LONG = 4096  # elements: of a row whose bytes show what a codec takes for an element
SENT = ("weights", "differences")


@dataclass
class OwnRows(FlatLeaf):
    """This rank's row of the weights in use, of the exact ones that it sent last, and how far steps move them.

    A checkpoint needs these. All other ranks' rows come from their checkpoints. NaN until weights were gathered.
    """

    layout: ShardLayout
    versions: Versions
    versioned = True

    @classmethod
    def empty(cls, layout: ShardLayout) -> OwnRows:
        """Rows of weights that were not gathered yet."""
        whole = layout.whole.widened()
        rows = torch.full((2 * layout.row + 1,), torch.nan, dtype=whole.dtype, device=whole.device)
        return cls(layout, Versions(rows))

    @property
    def holds_back(self) -> bool:
        return False

    def save(self, field: str) -> Entries:
        """Copies, by parameter: "in_use" and "sent", in the shapes of this rank's shards, and "usual" of their row."""
        in_use, sent, usual = parts_of(self.flat)
        rows = zip(self._shards(in_use).items(), self._shards(sent).values(), strict=True)
        return {
            name: {"in_use": one.clone(), "sent": other.clone(), "usual": usual.clone()} for (name, one), other in rows
        }

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        in_use, sent, usual = parts_of(self.flat)
        places = {"in_use": self._shards(in_use), "sent": self._shards(sent)}
        places["usual"] = dict.fromkeys(self.layout.whole.names, usual)
        for key, of_key in places.items():
            for name, mine in of_key.items():
                saved = entries.get(name, {}).get(key)
                if saved is None or saved.shape != mine.shape:
                    found = "is not in the state" if saved is None else f"has shape {tuple(saved.shape)}"
                    raise ValueError(
                        f"the weights in use: {key!r} of parameter {name!r} {found}, but {tuple(mine.shape)} is needed "
                        "here: load the state with the model that saved it, or with resize=True without these"
                    )
                mine.copy_(saved)
        return {}

    def _shards(self, row: Tensor) -> dict[str, Tensor]:
        parts = row.split([shape.numel() for shape in map(torch.Size, self.layout.shapes)])
        shards = zip(self.layout.whole.names, parts, self.layout.shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in shards}


def parts_of(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of `OwnRows.flat`: the row in use, the row that was sent last, and the usual change of a step.

    This is the norm of the change that the last step brought. It at most doubles from step to step, so that one large
    change, as of weights that were swapped back after an evaluation, does not count as usual.
    """
    in_use, sent, usual = flat.split([(len(flat) - 1) // 2] * 2 + [1])
    return in_use, sent, usual


@dataclass
class HeldWeights:
    """The weights in use of a module's parameters. `rows`: (ranks, row), the same on all ranks; None before a gather."""

    own: OwnRows
    rows: Tensor | None = None
    resumes: bool = False  # the own rows are of a checkpoint


@dataclass(frozen=True)
class WeightKind:
    """Parameters of a module that are gathered in one type. `spans`: first byte of each in a row of bytes, and its end."""

    dtype: torch.dtype
    layout: ShardLayout
    spans: tuple[tuple[int, int], ...] = ()
    _cuts: dict[Codec | None, Cut | None] = field(default_factory=dict, repr=False, compare=False)

    def cut(self, codec: Codec | None) -> Cut | None:
        """Return the cut of the rows of all ranks for a codec, made once; None if they travel as they are."""
        if codec not in self._cuts:
            layout, given = self.layout.on_hosts(1), needed(codec, self.dtype) if self.numbers else None
            within = layout.spans, layout.row, layout.whole.ranks.rank, layout.whole.device
            self._cuts[codec] = None if given is None else cut_shards(given, *within)
        return self._cuts[codec]

    @cached_property
    def numbers(self) -> bool:
        """True if these are numbers that a codec takes."""
        return self.dtype.is_floating_point and self.dtype.itemsize > 1


@dataclass(frozen=True)
class WeightGather:
    """Each rank's row of weights for all ranks: one all-gather.

    `codec`: what travels; None for the weights as they are. `differences`: between exact weights and those in use, which
    all ranks hold, and `held` gives; else the weights themselves. `hosts`: rows travel once to each other host, and
    there among its ranks; all ranks get the same numbers as without. `per_host`: as it was found.
    """

    codec: Codec | None = None
    differences: bool = False
    hosts: Hierarchical | None = None
    per_host: int = field(default=1, repr=False)
    text: str = field(default="none", repr=False, compare=False)

    def __str__(self) -> str:
        """Return the text that builds it."""
        return self.text

    def placed(self, per_host: int, ranks: int) -> WeightGather:
        """Return the gather on hosts of so many ranks."""
        return dataclasses.replace(self, per_host=1 if per_host == ranks else per_host)

    def gather(
        self, mine: Tensor, out: Tensor, kind: WeightKind, held: HeldWeights | None = None, *, advances: bool = True
    ) -> Program[Tensor]:
        """Gather all ranks' rows in `out`, (ranks * row,), as a codec decodes them, one's own too; `mine` is this rank's.

        So all ranks compute with the same numbers, and none with the exact ones. `mine` may be a part of `out`. `kind`: the
        parameters. `held`: of the module, with `differences`. `advances`: False outside of training, where no later
        gather mends what a codec loses.
        """
        cut = kind.cut(self.codec)
        if cut is None:
            return _gather_exact(mine, out, self.per_host)
        if held is None:
            return _gather_encoded(mine, out, cut, self.per_host)
        if held.rows is None and not held.resumes:
            return _gather_first(mine, out, held, self.per_host)
        return _gather_differences(mine, out, held, cut, self.per_host, advances=advances)

    def gather_kinds(
        self,
        mine: Tensor,
        out: Tensor,
        kinds: Sequence[WeightKind],
        held: Sequence[HeldWeights | None],
        *,
        advances: bool = True,
    ) -> Program[Tensor]:
        """Gather rows of bytes, in which numbers of several types lie: each type by itself, all in one round.

        What are no numbers of 16 bits or more travels as it is. `advances`: as for `gather`.
        """
        ranks, wholes, programs = out.numel() // mine.numel(), [], []
        for kind, of_kind in zip(kinds, held, strict=True):
            own = torch.cat([mine[first:end] for first, end in kind.spans]).view(kind.dtype)
            wholes.append(own.new_empty(ranks * own.numel()))
            programs.append(self.gather(own, wholes[-1], kind, of_kind, advances=advances))
        yield from together(*programs)
        rows = out.view(ranks, -1)
        for kind, whole in zip(kinds, wholes, strict=True):
            parts = whole.view(torch.uint8).view(ranks, -1).split([end - first for first, end in kind.spans], 1)
            for (first, end), part in zip(kind.spans, parts, strict=True):
                rows[:, first:end].copy_(part)
        return out


def _gather_exact(mine: Tensor, out: Tensor, per_host: int) -> Program[Tensor]:
    row = mine.view(torch.uint8)  # bytes share a round with those of other types
    gathered = yield from gathered_rows(pad(row, (0, -len(row) % ALIGNMENT)), per_host)
    out.view(torch.uint8).view(-1, len(row)).copy_(gathered[:, : len(row)])
    return out


def _gather_first(mine: Tensor, out: Tensor, held: HeldWeights, per_host: int) -> Program[Tensor]:
    """Gather the weights that later differences are to."""
    yield from _gather_exact(mine, out, per_host)
    held.rows = out.view(-1, mine.numel()).clone()
    _note_own(held, mine, mine, mine.to(working_dtype(mine.dtype)).norm() / (2 * FAR))  # the first step may change half
    return out


def _gather_encoded(mine: Tensor, out: Tensor, cut: Cut, per_host: int) -> Program[Tensor]:
    wide = working_dtype(mine.dtype)
    payload = temporary((1, cut.row_bytes), dtype=torch.uint8, device=mine.device).zero_()
    row, given = mine.numel(), mine.to(wide)
    cut.encode_own(given if cut.own is not None else lengthened(given, 1, cut.length), None, payload)
    del given  # a copy of 16 bits' numbers: its memory is free while payloads travel
    gathered = (yield AllGather(payload)) if per_host == 1 else (yield from gathered_rows(payload, per_host))
    if out.dtype == wide and (cut.rows is not None or row == cut.length):
        cut.decode(gathered.transpose(0, 1), out)
    else:
        out.view(-1, row).copy_(_decoded_rows(gathered, row, cut, wide))
    return out


def _decoded_rows(gathered: Tensor, row: int, cut: Cut, dtype: torch.dtype) -> Tensor:
    """Return the numbers that all ranks' payloads stand for, (ranks, row)."""
    stride = cut.length if cut.rows is None else row
    wide = temporary((len(gathered), stride), dtype=dtype, device=gathered.device)
    cut.decode(gathered.transpose(0, 1), wide.view(-1))
    return wide[:, :row]


def _gather_differences(
    mine: Tensor, out: Tensor, held: HeldWeights, cut: Cut, per_host: int, *, advances: bool
) -> Program[Tensor]:
    """Add what all ranks' payloads say to the weights in use.

    A rank whose weights are those that it sent last sends zeros. So the weights in use stay as they are until an optimizer
    changes some. After a checkpoint was loaded the payload has the weights in use behind the codes.

    Weights that somebody has written, as of a moving average or a checkpoint, differ by more than a codec has steps for.
    The last byte of a payload says so, and outside of training the exact rows follow. In training the next differences
    mend it: there a GPU's host would have to wait for each payload.
    """
    sends_in_use, size = held.rows is None, cut.row_bytes
    end = size + sends_in_use * mine.nbytes
    in_use, sent, usual = parts_of(held.own.flat)
    in_use = in_use.to(mine.dtype)
    difference = mine.to(working_dtype(mine.dtype)) - in_use.nan_to_num(0.0, 0.0, 0.0)
    changed, moved = (mine != sent.to(mine.dtype)).any(), difference.norm()
    far = changed & ~(moved <= FAR * usual)
    payload = temporary((1, -(-(end + 1) // ALIGNMENT) * ALIGNMENT), dtype=torch.uint8, device=mine.device).zero_()
    given = torch.where(changed, difference, 0.0)
    given = given if cut.own is not None else lengthened(given, 1, cut.length)
    cut.encode_own(given, None, payload[:, :size])
    payload[0, size:end] = in_use.clone().view(torch.uint8) if sends_in_use else payload.new_empty(0)
    payload[0, -1] = far
    gathered = (yield from gathered_rows(payload, per_host)).view(-1, payload.shape[1])
    before = gathered[:, size:end].reshape(-1).view(mine.dtype) if held.rows is None else held.rows
    held.rows = before.nan_to_num_(0.0, 0.0, 0.0).view(len(gathered), -1)  # no difference mends what is not finite
    held.rows.add_(_decoded_rows(gathered[:, :size].unsqueeze(1), mine.numel(), cut, difference.dtype))
    if not advances and bool(gathered[:, -1].any()):
        yield from _gather_exact(mine, out, per_host)
        held.rows.view(-1).copy_(out)
    elif advances:
        usual = torch.where(changed, torch.where(usual > 0, torch.fmin(moved, 2 * usual), moved), usual)
    _note_own(held, held.rows[held.own.layout.whole.ranks.rank], mine, usual)
    out.copy_(held.rows.view(-1))  # last: `mine` may be a part of it
    return out


def _note_own(held: HeldWeights, in_use: Tensor, sent: Tensor, usual: Tensor) -> None:
    for place, numbers in zip(parts_of(held.own.update().after), (in_use, sent, usual), strict=True):
        place.copy_(numbers)


@names_of_shards()
def weight_gather(spec: Spec) -> WeightGather:
    """Build the gather of weights by a specification, whose codec rounds to the nearest.

    With less than a byte an element, differences travel. The option `send` is `weights` or `differences`. `hosts+` before it
    sends each row once to each other host. Raises ValueError for a specification that is refused.

    >>> weight_gather("int4").differences, weight_gather("int4:send=weights").differences, weight_gather("int8").differences
    (True, False, False)
    """
    hosts, inner = split_hosts(spec)
    send, given = split_option(inner, "send")
    if send not in (None, *SENT):
        raise ValueError(f"send is {' or '.join(SENT)}, got {send!r} in {spec!r}")
    built = compressor(given)
    codec, _, bits = codec_of(built, spec)
    if codec is None and send is not None:
        raise ValueError(f"weights that are not encoded are sent themselves: leave send out of {spec!r}")
    if bits != WIDTHS[0]:
        raise ValueError(f"residual_bits is for residuals, and weights have none: leave it out of {spec!r}")
    if own_traits(codec).draws:
        raise ValueError(f"weights are rounded to the nearest, or each gather would give others; got {spec!r}")
    few = codec is not None and codec.row_bytes(LONG) < LONG
    text = shown(hosts, None, specification(built), send)
    return WeightGather(codec, few if send is None else send == "differences", hosts, text=text)
