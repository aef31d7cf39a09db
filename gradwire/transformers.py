"""For Hugging Face's Trainer: `from gradwire.transformers import GradwireCallback`."""

from .hooks.frameworks.transformers import GradwireCallback, LocalStepsCallback

__all__ = ["GradwireCallback", "LocalStepsCallback"]
