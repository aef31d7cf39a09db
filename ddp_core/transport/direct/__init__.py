"""Collectives in which each block crosses the network once, straight to who needs it."""

from .choice import GLOO, PINNED, Choice
from .collectives import Collectives, ways_to_gather
from .way import Kind

__all__ = ["GLOO", "PINNED", "Choice", "Collectives", "Kind", "ways_to_gather"]
