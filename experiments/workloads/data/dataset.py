"""A data set as the drivers use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torch.utils.data import Dataset as Samples

from ..sample import Batch, SampleShape


@dataclass(frozen=True)
class Dataset(SampleShape):
    """Samples to train on and validation samples; `source` says where they lie."""

    train: Samples[Batch]
    held_out: Samples[Batch]
    source: str

    def train_batches(self, batch_size: int, *, seed: int, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's batches without end, shuffled anew each epoch; ranks never share a sample within one.

        Raises ValueError where an epoch has no batch for every rank.
        """
        size, needed = len(self.train), batch_size * world_size  # type: ignore[arg-type]
        if size < needed:
            raise ValueError(
                f"{self.name!r} has {size} samples to train on, fewer than one batch of {batch_size} for each of "
                f"{world_size} ranks: lower --batch-size, or give more data"
            )
        return self._epochs(batch_size, DistributedSampler(self.train, world_size, rank, seed=seed, drop_last=True))

    def _epochs(self, batch_size: int, sampler: DistributedSampler[Any]) -> Iterator[Batch]:
        private = torch.Generator()  # the loader would draw from the global one otherwise
        loader = DataLoader(self.train, batch_size, sampler=sampler, drop_last=True, generator=private)
        for epoch in count():
            sampler.set_epoch(epoch)
            yield from loader

    def evaluation_batches(self, batch_size: int, limit: int) -> Iterator[Batch]:
        """At most `limit` batches of validation samples, spread evenly, the same at every call."""
        size = len(self.held_out)  # type: ignore[arg-type]
        wanted = min(limit * batch_size, size)
        chosen = Subset(self.held_out, [index * size // wanted for index in range(wanted)])
        return islice(iter(DataLoader(chosen, batch_size, generator=torch.Generator())), limit)

    def summary(self) -> dict[str, Any]:
        """Return the entry of `results.json` about the data."""
        return {
            "name": self.name,
            "source": self.source,
            "train_samples": len(self.train),  # type: ignore[arg-type]
            "held_out_samples": len(self.held_out),  # type: ignore[arg-type]
        }
