"""gradwire inside of Lightning Fabric."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...compress import Spec
from ...ddp_core import DistributedDataParallel
from .lightning_package import FabricDDPStrategy


class GradwireFabricStrategy(FabricDDPStrategy):
    """gradwire's DistributedDataParallel in Fabric: `Fabric(strategy=GradwireFabricStrategy("int4"), ...)`.

    `options`: those of Fabric's DDPStrategy, of torch's DistributedDataParallel, and `transport`. The handle of a model that
    `fabric.setup` returned is `gradwire.handle_of(model)`. To save its state, add
    `{"compression": gradwire.GatheredState(handle)}` to the state of `fabric.save`. The loss scale of
    `precision="16-mixed"` is followed. By name: `Fabric(strategy="gradwire_int4")`.
    """

    def __init__(self, compressor: Spec, **options: Any) -> None:
        super().__init__(**options)
        self._compressor = compressor

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap a model as Fabric does, in gradwire's DistributedDataParallel."""
        device_ids = self._determine_ddp_device_ids()
        beside = nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream())
        scaler = getattr(self.precision, "scaler", None)
        with beside:  # DDP is made on a stream of its own, as torch's notes on CUDA ask for
            return DistributedDataParallel(
                module, device_ids, compressor=self._compressor, scaler=scaler, **self._ddp_kwargs
            )
