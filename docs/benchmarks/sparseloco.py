"""The top-k of a difference's chunks in 2 bits: SparseLoCo (Covenant-72B, arXiv 2603.08163). It is not part of gradwire.

hundredfold.py trains with it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compress import Layout, Traffic

SIDE, DECAY, BITS, LEVELS = 64, 0.95, 14, 4  # 12 bits of an index, and 2 of a value


class SparseLoCo:
    """Averages of differences by their largest elements, with error feedback.

    The mean of an element is over all sites, as in the paper, or over those that sent it, as in its authors' code.
    """

    def __init__(self, layout: Layout, share: float, over: str) -> None:
        self.layout, self.share, self.over, self.sites = layout, share, over, layout.ranks.world_size
        self.residuals = torch.zeros(self.sites, layout.numel)
        kept = sum(chunked(torch.empty(1, *shape)).shape[1] * self._kept(shape) for shape in layout.shapes)
        payload = (kept * BITS + 32 * (LEVELS + 1) * len(layout.shapes)) / 8
        self.traffic = Traffic(1, round(payload), (self.sites - 1) * payload)

    def _kept(self, shape: Sequence[int]) -> int:
        """Return how many elements of a chunk of a parameter travel."""
        return math.ceil(self.share * min(SIDE * SIDE, math.prod(shape)))

    def step(self, differences: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of what the sites send."""
        wanted = DECAY * self.residuals + torch.stack([*differences])
        views = [self.layout.views(each) for each in wanted]
        by_name = [torch.stack([view[name] for view in views]) for name in self.layout.names]
        sent = torch.cat([self._sent(each, self._kept(each.shape[1:])).flatten(1) for each in by_name], 1)
        self.residuals = wanted - sent
        senders = (sent != 0).sum(0).clamp(min=1) if self.over == "senders" else self.sites
        return [sent.sum(0) / senders] * self.sites

    def _sent(self, values: Tensor, kept: int) -> Tensor:
        """Return a parameter of all sites with its largest elements alone, rounded to four levels that fit them."""
        chunks = chunked(values)
        places = chunks.abs().topk(kept, -1).indices
        exact = chunks.gather(-1, places)
        flat = exact.flatten(1)
        mean = flat.mean(1, keepdim=True)
        scale = 6 * flat.std(1, correction=0, keepdim=True).clamp(min=1e-30) / LEVELS
        codes = ((flat - mean) / scale + LEVELS / 2).round().clamp(0, LEVELS - 1).long()
        sums, counts = (
            torch.zeros(self.sites, LEVELS).scatter_add_(1, codes, each) for each in (flat, torch.ones_like(flat))
        )
        rounded = (sums / counts.clamp(min=1)).gather(1, codes).view_as(exact)
        return unchunked(torch.zeros_like(chunks).scatter_(-1, places, rounded), values)


def chunked(values: Tensor) -> Tensor:
    """Return chunks of 64 x 64, or a vector as one: (sites, chunks, elements)."""
    if values.dim() < 3:
        return values.unsqueeze(1)
    return values.unflatten(1, (-1, SIDE)).unflatten(3, (-1, SIDE)).transpose(2, 3).flatten(3).flatten(1, 2)


def unchunked(chunks: Tensor, like: Tensor) -> Tensor:
    """Return parameters of this shape from their chunks."""
    if like.dim() < 3:
        return chunks.squeeze(1)
    rows, columns = like.shape[1] // SIDE, like.shape[2] // SIDE
    return chunks.view(-1, rows, columns, SIDE, SIDE).transpose(2, 3).reshape(like.shape)
