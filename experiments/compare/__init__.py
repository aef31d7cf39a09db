"""The same training with each compressor, side by side."""

from .command import compare
from .config import CompareConfig

__all__ = ["CompareConfig", "compare"]
