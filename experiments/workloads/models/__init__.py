"""The models that the drivers train and plan."""

from .build import MODELS, ModelConfig, build_model, model_names

__all__ = ["MODELS", "ModelConfig", "build_model", "model_names"]
