"""Buckets of ours inside those that DDP hands over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compress import Layout, Program, all_reduce
from .buckets import Bucket


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


def all_done(futures: list[torch.futures.Future[Tensor]], buffer: Tensor) -> torch.futures.Future[Tensor]:
    """A future that holds `buffer` once all parts have been averaged in it, or raises what one of them raised."""

    def finished(done: torch.futures.Future[Any]) -> Tensor:
        for future in done.value():
            future.value()
        return buffer

    return torch.futures.collect_all(futures).then(finished)


def in_order(parts: Mapping[int, tuple[Sequence[Tensor], Sequence[Part]]]) -> Iterator[tuple[str, ...]]:
    """The names in our buckets, by the index of DDP's bucket that they are in."""
    for index in sorted(parts):
        yield from (part.bucket.layout.names for part in parts[index][1])


def places_in(layout: Layout, names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """First and last element of the named parameters in the flat buffer."""
    spans = {n: (o, o + s) for n, o, s in zip(layout.names, layout.offsets, layout.sizes, strict=True)}
    return tuple(spans[name] for name in names)


def labelled(index: int, names: Sequence[str]) -> str:
    """What messages call a bucket."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"bucket {index} (parameters {shown})"
