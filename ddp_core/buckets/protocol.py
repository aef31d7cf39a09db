"""A bucket of gradients as whoever averages it sees it, with the methods of torch's GradBucket."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Bucket(Protocol):
    """The methods of torch's `dist.GradBucket` that gradwire calls. Its own buckets, slices and shards have them, too."""

    def index(self) -> int:
        """Return its place among all that is sent."""

    def buffer(self) -> Tensor:
        """Return all gradients, one behind the other."""

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of the buffer."""

    def is_last(self) -> bool:
        """Return True if it is the last one of a step, as far as its index shows."""


class LastingBucket(Bucket, Protocol):
    """A bucket that is there in all steps, and so keeps its plan.

    `all_parameters`: of all members, whether they are sent in this step or not. `scale`: what gradients are multiplied by on
    their way in; None where they come as a hook gets them.
    """

    plan: Any
    all_parameters: list[Tensor]

    @property
    def scale(self) -> float | None: ...


class FlatBucket:
    """A bucket of gradwire's own. `flat`: its gradients, one behind the other; `place`: its index."""

    place: int
    flat: Tensor
    all_parameters: list[Tensor]

    def index(self) -> int:
        """Return its place among all that is sent."""
        return self.place

    def buffer(self) -> Tensor:
        """Return all gradients, flat."""
        return self.flat

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of the buffer."""
        return self.all_parameters
