"""For Lightning's Trainer and Fabric: `from gradwire.lightning import GradwireStrategy`."""

from .hooks.frameworks.fabric import GradwireFabricStrategy
from .hooks.frameworks.lightning import GradwireStrategy, LocalStepsStrategy

__all__ = ["GradwireFabricStrategy", "GradwireStrategy", "LocalStepsStrategy"]
