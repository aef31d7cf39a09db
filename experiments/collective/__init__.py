"""`gradwire collective`: how fast collectives are, by size and backend."""

from .command import collective
from .measure import CollectiveConfig

__all__ = ["CollectiveConfig", "collective"]
