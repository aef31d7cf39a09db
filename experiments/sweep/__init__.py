"""`gradwire sweep`: a study is a grid over a command's options, a table and its pictures."""

from .command import sweep_command
from .config import SweepConfig

__all__ = ["SweepConfig", "sweep_command"]
