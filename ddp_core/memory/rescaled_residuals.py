"""The scale that a loss is multiplied by, and with it what is held back of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Scaler(Protocol):
    """The part of torch.amp.GradScaler that shows its scale."""

    def get_scale(self) -> float:
        """The factor of the next loss; on CUDA the host waits for it."""
        ...


class LossScale:
    """Has what is held back follow the scale of a scaler; `rescale` multiplies it by a factor. It comes after `before`."""

    def __init__(self, scaler: Scaler, rescale: Callable[[float], None], before: LossScale | None = None) -> None:
        if not hasattr(scaler, "get_scale"):
            raise TypeError(f"scaler is a torch.amp.GradScaler, or has get_scale() as that has; got {scaler!r}")
        self.scaler, self._rescale = scaler, rescale
        # of what is held back; None where a loaded state tells not
        self._scale: float | None = None if before is None else before._scale
        self._ahead: tuple[float, tuple[int, int]] | None = None  # a scale, and when it was read: see `_moment`

    def read_ahead(self) -> None:
        """Read the scale before a forward, when a GPU has little left to do that the host would wait for."""
        if (moment := self._moment()) is not None and (self._ahead is None or self._ahead[1] != moment):
            self._ahead = float(self.scaler.get_scale()), moment

    def _moment(self) -> tuple[int, int] | None:
        """Return what differs once the scale has changed; None where nothing shows that."""
        scale = getattr(self.scaler, "_scale", None)
        return (id(scale), scale._version) if isinstance(scale, Tensor) and not scale.is_inference() else None

    def _now(self) -> float:
        ahead, self._ahead = self._ahead, None
        return ahead[0] if ahead is not None and ahead[1] == self._moment() else float(self.scaler.get_scale())

    def follow(self) -> None:
        """Bring what is held back to the scaler's scale, between steps."""
        scale, before = self._now(), self._scale
        if before is not None and scale != before:
            self._rescale(scale / before)
        self._scale = scale

    def catch_up(self) -> None:
        """The same before a save, where the scale of what is held back is known."""
        if self._scale is not None:
            self.follow()

    def forget(self) -> None:
        """Take the scaler's scale at the next step for that of a loaded state: both were saved together."""
        self._scale = None
