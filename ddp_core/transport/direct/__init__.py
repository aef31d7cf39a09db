"""Collectives in which each block crosses the network once, straight to who needs it."""

from .choice import Choice
from .collectives import Collectives
from .way import Kind

__all__ = ["Choice", "Collectives", "Kind"]
