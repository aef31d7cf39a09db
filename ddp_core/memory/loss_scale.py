"""The scale that a loss is multiplied by, and with it what is held back of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Scaler(Protocol):
    """The part of torch.amp.GradScaler that shows its scale."""

    def get_scale(self) -> float:
        """The factor of the next loss; on CUDA the host waits for it."""
        ...


class LossScale:
    """Has what is held back follow the scale of a scaler; `rescale` multiplies it by a factor."""

    def __init__(self, scaler: Scaler, rescale: Callable[[float], None]) -> None:
        if not hasattr(scaler, "get_scale"):
            raise TypeError(f"scaler is a torch.amp.GradScaler, or has get_scale() as that has; got {scaler!r}")
        self.scaler, self._rescale = scaler, rescale
        self._scale: float | None = None  # of what is held back; None where a loaded state tells not

    def follow(self) -> None:
        """Bring what is held back to the scaler's scale, between steps."""
        scale, before = float(self.scaler.get_scale()), self._scale
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
