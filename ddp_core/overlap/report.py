"""What overlapping has brought: seconds that training waited, and the bounds of what it could."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OverlapReport:
    """Of an overlapped model, on this rank.

    `step`: the last one whose updates were all made; 0 before the first. `exposed`: seconds that its communication held up
    training; on CUDA, where the host does not know, those of the last step that was measured, whose forward waited where it
    used parameters: None before there is one, and always where no order is looked for ("backward", "synchronous", parameters
    on several GPUs). `order`: "backward", "priority" or "synchronous", what is in use. `bound`: seconds of the shortest step
    that any order allows on this link (T*), and `synchronous_bound` of one that waits at backward's end, both computed from
    measured times; None before these are there. `readers`: how many steps were made to wait between backward and the next
    forward, by the line of code that did so.
    """

    step: int
    exposed: float | None
    order: str
    bound: float | None
    synchronous_bound: float | None
    readers: Mapping[str, int]

    def __str__(self) -> str:
        """A few lines for people."""
        bounds = (
            f"at best {self.bound:.4f} s a step, {self.synchronous_bound:.4f} s without overlap"
            if self.bound is not None and self.synchronous_bound is not None
            else "no bounds yet"
        )
        exposed = "nothing measured yet" if self.exposed is None else f"{self.exposed:.4f} s exposed"
        lines = [f"step {self.step}: order {self.order}, {exposed}; {bounds}"]
        return "\n".join(
            [*lines, *(f"waited for early by {where}: {count} steps" for where, count in self.readers.items())]
        )
