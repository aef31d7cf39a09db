"""`gradwire collective`: how fast collectives are, by size and backend."""

from .command import collective
from .config import CollectiveConfig, elements_of

__all__ = ["CollectiveConfig", "collective", "elements_of"]
