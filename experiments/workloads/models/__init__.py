"""The models that the drivers train and plan."""

from .build import MODELS, SIZED, TORCHVISION, VISION, ModelConfig, build_model, model_names

__all__ = ["MODELS", "SIZED", "TORCHVISION", "VISION", "ModelConfig", "build_model", "model_names"]
