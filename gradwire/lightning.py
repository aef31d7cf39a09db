"""For Lightning's Trainer and Fabric: `from gradwire.lightning import GradwireStrategy`."""

from .hooks.frameworks.lightning import GradwireFabricStrategy, GradwireStrategy, LocalStepsStrategy

__all__ = ["GradwireFabricStrategy", "GradwireStrategy", "LocalStepsStrategy"]
