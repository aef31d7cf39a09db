"""The package of Lightning that the user has: `lightning` or `pytorch_lightning`, whose classes do not know each other."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PACKAGES = {  # name: (where its Trainer is, where its Fabric is)
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}


def _package() -> tuple[str, str]:
    """The one that the user has imported, or else has installed."""
    found = next((name for name in PACKAGES if name in sys.modules), None)
    found = found or next((name for name in PACKAGES if find_spec(name)), None)
    if found is None:
        raise ModuleNotFoundError("Lightning is not installed: pip install 'gradwire[lightning]'")
    return PACKAGES[found]


_of_trainer, _of_fabric = (import_module(f"{name}.strategies") for name in _package())
DDPStrategy: Any = _of_trainer.DDPStrategy
FabricDDPStrategy: Any = _of_fabric.DDPStrategy
NAMED: tuple[Any, Any] = _of_trainer.StrategyRegistry, _of_fabric.STRATEGY_REGISTRY  # strategies by name
