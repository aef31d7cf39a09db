"""Buckets of ours inside those that DDP hands over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress import Layout, Program, all_reduce, most_rounds
from ..buckets.grad_bucket import GradBucket
from ..buckets.layout import layout_of
from ..engine.engine import Engine
from ..memory.bucket_memory import Bucket
from ..memory.checkpoint import fingerprint
from ..memory.model_memory import Buckets


@dataclass(frozen=True)
class Part:
    """A bucket of ours inside one of DDP's: all of it (`places` is None) or the listed pieces of its flat buffer."""

    bucket: Bucket
    places: tuple[tuple[int, int], ...] | None

    def take(self, flat: Tensor) -> Tensor:
        """The part's gradients, flat: the buffer itself, or a copy of the pieces."""
        return flat if self.places is None else torch.cat([flat[first:end] for first, end in self.places])

    def reduce(self, flat: Tensor, step: int, buffer: Tensor, scaled: bool, watched: bool) -> Program[Tensor]:
        """Average this part of `flat`, which is `buffer` as real numbers, in place; returns `buffer`.

        All of it is in the program, so that on CUDA it runs on the side stream, and the future's events cover it. `scaled`:
        the gradients come divided by the world size, to a compressor that averages.
        """
        part = self.take(flat)
        average = yield from all_reduce(part, "sum") if scaled else self.bucket.reduce(part, step, watched)
        self.give(flat, average)
        return buffer

    def give(self, flat: Tensor, average: Tensor) -> None:
        """Write the average where the gradients came from."""
        if self.places is not None:
            pieces = [flat[first:end] for first, end in self.places]
            torch._foreach_copy_(pieces, list(average.split([piece.numel() for piece in pieces])))


class Parts:
    """Our buckets inside those that DDP hands over, which it may rebuild between steps."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._known: dict[int, tuple[Sequence[Tensor], list[Part]]] = {}

    def of(
        self, bucket: dist.GradBucket | GradBucket, flat: Tensor, engine: Engine, name: Callable[[Tensor], str]
    ) -> list[Part]:
        """The parts of a bucket, whose gradients are `flat`. `name`: of a parameter."""
        parameters = bucket.parameters()
        known, parts = self._known.get(bucket.index(), ((), []))
        if known is not parameters and list(map(id, known)) != list(map(id, parameters)):
            parts = self._meet({name(parameter): parameter for parameter in parameters}, flat, engine)
            self._known[bucket.index()] = (parameters, parts)
            self._buckets.arrange(self._names())
        return parts

    def _meet(self, named: Mapping[str, Tensor], flat: Tensor, engine: Engine) -> list[Part]:
        """Prepare for a bucket that DDP has not handed over before. All ranks meet the same one at the same time."""
        group = engine.group
        layout = layout_of(named, flat.dtype, flat.device, group.size(), group.rank())
        if not self._known:
            self._agree(engine, layout)
        parts = []
        for names in self._buckets.split(layout.names):
            mine = layout_of({name: named[name] for name in names}, flat.dtype, flat.device, group.size(), group.rank())
            rounds = most_rounds(self._buckets.compressor, [mine])
            engine.prepare(rounds + self._buckets.partial)  # which parameters were used may travel apart
            places = None if mine == layout else places_in(layout, names)
            parts.append(Part(self._buckets.get(mine) or self._buckets.add(mine), places))
        return parts

    def _agree(self, engine: Engine, layout: Layout) -> None:
        """At the first bucket: raise ValueError on every rank unless all are set up alike."""
        method = fingerprint(self._buckets.compressor)
        engine.agree(
            f"{method} at step {self._buckets.step - 1} with a first bucket of "
            f"{len(layout.names)} parameters, {layout.numel} x {layout.dtype}"
        )

    def _names(self) -> Iterator[tuple[str, ...]]:
        """The names in our buckets, by the index of DDP's bucket that they are in."""
        for index in sorted(self._known):
            yield from (part.bucket.layout.names for part in self._known[index][1])


def all_done(futures: list[torch.futures.Future[Tensor]], buffer: Tensor) -> torch.futures.Future[Tensor]:
    """A future that holds `buffer` once all parts have been averaged in it, or raises what one of them raised."""

    def finished(done: torch.futures.Future[Any]) -> Tensor:
        for future in done.value():
            future.value()
        return buffer

    return torch.futures.collect_all(futures).then(finished)


def places_in(layout: Layout, names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """First and last element of the named parameters in the flat buffer."""
    spans = {n: (o, o + s) for n, o, s in zip(layout.names, layout.offsets, layout.sizes, strict=True)}
    return tuple(spans[name] for name in names)


def labelled(index: int, names: Sequence[str]) -> str:
    """What messages call a bucket."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"bucket {index} (parameters {shown})"
