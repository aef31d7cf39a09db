"""`gradwire sweep`: a study, each of whose points is a command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..sweep import SweepConfig, run_study
from .commands import COMMANDS
from .parsing import configuration


def sweep_command(config: SweepConfig) -> int:
    """Run the study; the command's exit code."""
    return run_study(config, options_of)


def options_of(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """All options of a command with these arguments, defaults included. Raises ValueError where it refuses them."""
    return asdict(configuration(COMMANDS[command], command, arguments))
