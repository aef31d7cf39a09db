"""The same training with each compressor, side by side."""

from .command import CompareConfig, compare

__all__ = ["CompareConfig", "compare"]
