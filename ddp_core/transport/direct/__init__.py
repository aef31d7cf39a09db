"""Collectives in which each block crosses the network once, straight to who needs it."""

from .choice import GLOO, PINNED, Choice, Kind
from .collectives import Collectives, Direct, best_ways

__all__ = ["GLOO", "PINNED", "Choice", "Collectives", "Direct", "Kind", "best_ways"]
