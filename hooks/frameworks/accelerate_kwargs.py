"""gradwire's hook for Accelerate, which takes hooks by the names of an enum only, in a handler of keywords."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ...compress import Spec
from ..comm_hook import comm_hook

DistributedDataParallelKwargs: Any = import_module("accelerate.utils").DistributedDataParallelKwargs


class AccelerateKwargs(DistributedDataParallelKwargs):
    """gradwire's hook on the models of an accelerator: `Accelerator(kwargs_handlers=[AccelerateKwargs("int4")])`.

    `options`: those of `gradwire.comm_hook`, by the name `hook_options`, and of Accelerate's DistributedDataParallelKwargs.
    After `prepare`, `gradwire.accelerate(accelerator, model)` returns the handle and adds its state to the checkpoints.
    """

    def __init__(
        self, compressor: Spec = "int4", *, hook_options: dict[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._hook = comm_hook(compressor, **(hook_options or {}))

    @property  # type: ignore[misc]  # of object it can be set
    def __class__(self) -> type:
        """Accelerate's class, which it looks handlers up by: it takes no subclass."""
        known: type = DistributedDataParallelKwargs
        return known

    def to_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Return the arguments of DistributedDataParallel, without the hook."""
        found: dict[str, Any] = super().to_dict(*arguments, **named)
        found.pop("_hook", None)
        return found

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the hook on a model that Accelerate has just wrapped."""
        model.register_comm_hook(None, self._hook)
