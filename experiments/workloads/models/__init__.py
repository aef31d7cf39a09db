"""The models that the drivers train and plan."""

from .build import MODELS, TORCHVISION, VISION, ModelConfig, build_model, model_names

__all__ = ["MODELS", "TORCHVISION", "VISION", "ModelConfig", "build_model", "model_names"]
