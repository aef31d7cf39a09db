"""gradwire's hook for Accelerate, which takes hooks by the names of an enum only, in a handler of keywords."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel

from ...compress import Spec
from ..comm_hook import comm_hook


class AccelerateKwargs(DistributedDataParallelKwargs):
    """gradwire's hook on the models of an accelerator: `Accelerator(kwargs_handlers=[AccelerateKwargs("int4")])`.

    After `prepare`, `gradwire.accelerate(accelerator, model)` returns the handle and adds its state to the checkpoints.

    Args:
        compressor: the compressor of the gradients. See `gradwire.compressor`.
        hook_options: other arguments of `gradwire.comm_hook`.
        options: arguments of Accelerate's DistributedDataParallelKwargs.
    """

    def __init__(
        self, compressor: Spec = "int4", *, hook_options: dict[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._hook = comm_hook(compressor, **(hook_options or {}))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Accelerate's class, which it looks handlers up by: it takes no subclass."""
        return DistributedDataParallelKwargs

    def to_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Return the arguments of DistributedDataParallel, without the hook."""
        found: dict[str, Any] = super().to_dict(*arguments, **named)
        found.pop("_hook", None)
        return found

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the hook on a model that Accelerate has just wrapped."""
        model.register_comm_hook(None, self._hook)
