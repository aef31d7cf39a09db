"""The values of parameters that ranks compare at their first bucket: those before the first forward of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ..transport.rank_messages import bit_sum, digest


class StartingValues:
    """Sums of a model's parameters, taken before forwards until ranks have compared them: at the start, and after a load.

    The first forward counts, not the first bucket: SAM moves each rank's parameters by its own ascent before the first
    averaged backward. The last forward shows what something inside backward has changed since, such as an optimizer that
    steps there, before any average has come.
    """

    def __init__(self) -> None:
        self.due = True
        self._first: Mapping[Tensor, Tensor] = {}
        self._last: Mapping[Tensor, Tensor] = {}

    def expect(self) -> None:
        """Have the ranks compare values anew: this one has loaded a state."""
        self.due, self._first, self._last = True, {}, {}

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Look at the parameters before a forward."""
        self._last = {each: bit_sum(each) for each in parameters}
        self._first = self._first or self._last

    def text(self, parameters: Iterable[Tensor]) -> str:
        """Return what ranks compare of the parameters of their first bucket, and do so only once."""
        now = {each: bit_sum(each) for each in parameters}
        first, last, present = (
            digest([sums.get(each, now[each]) for each in now]) for sums in (self._first, self._last, now)
        )
        self.due, self._first, self._last = False, {}, {}
        if last == present:
            return f"their values {first}"
        return (
            f"their values {first}, changed inside backward to {present} before an average came, as by an optimizer that "
            "steps in a hook (call optimizer.step() after backward, or use "
            "torch.distributed.optim._apply_optimizer_in_backward)"
        )
