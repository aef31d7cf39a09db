"""Collectives in which each block crosses the network once, straight to who needs it."""

from .choice import GLOO, PINNED, Choice
from .collectives import Collectives, best_ways
from .way import Kind

__all__ = ["GLOO", "PINNED", "Choice", "Collectives", "Kind", "best_ways"]
