"""For Lightning's Trainer: `from gradwire.lightning import GradwireStrategy`."""

from .hooks.frameworks.lightning import GradwireStrategy

__all__ = ["GradwireStrategy"]
