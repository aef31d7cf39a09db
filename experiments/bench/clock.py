"""When the last gradient of a backward was there."""

from __future__ import annotations

from torch import Tensor, nn

from ...ddp_core.measure.clock import Clock


class LastGradient:
    """When the last gradient of a backward was there: made before a DDP wraps the model, so that its mark comes first.

    At first it watches all parameters; after `watch_last_only` only the one that came last, which costs the step nothing.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self._clock = clock
        self._last: Tensor | None = None
        self._hooks = {
            p: p.register_post_accumulate_grad_hook(self._ready) for p in model.parameters() if p.requires_grad
        }
        self.moment: float | None = None

    def _ready(self, parameter: Tensor) -> None:
        self._last, self.moment = parameter, self._clock.now()

    def watch_last_only(self) -> None:
        """Go on with the parameter that came last."""
        for parameter, hook in self._hooks.items():
            if parameter is not self._last:
                hook.remove()
