"""The command line: sub-commands, each with a dataclass that makes its flags and its YAML keys."""

from .arguments import split_specs
from .commands import COMMANDS, Command
from .main import main

__all__ = ["COMMANDS", "Command", "main", "split_specs"]
