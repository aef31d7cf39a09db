"""`gradwire sweep`: a study is a grid over a command's options, a table and its pictures."""

from .command import run_study
from .config import SweepConfig

__all__ = ["SweepConfig", "run_study"]
