"""`gradwire advise`: whether to compress on these hosts, and how."""

from .command import advise_command
from .config import AdviseConfig

__all__ = ["AdviseConfig", "advise_command"]
