"""The table of sub-commands: a new one is one entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Command:
    """A sub-command, imported when it is run.

    `config` and `function` are "module:attribute": a dataclass, whose fields are the flags and the YAML keys, and a
    function from that dataclass to the exit code. A module that starts with a dot lies in `gradwire.experiments`.
    `defaults` is the YAML file that is used where no `--config` is given.
    """

    help: str
    config: str
    function: str
    defaults: Path | None = None

    def config_class(self) -> type[Any]:
        """The dataclass of the command's options."""
        found = _imported(self.config)
        if not isinstance(found, type):
            raise TypeError(f"{self.config} is not a dataclass: {found!r}")
        return found

    def run(self, config: object) -> int:
        """Run the command; its exit code."""
        function: Callable[[object], int] = _imported(self.function)
        return function(config)


def _imported(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module, package=__package__.rpartition(".")[0]), attribute)


COMMANDS: dict[str, Command] = {
    "compare": Command(
        "train with each compressor and compare loss, speed and bytes on the wire",
        config=".compare:CompareConfig",
        function=".compare:compare",
        defaults=CONFIGS / "compare.yaml",
    ),
    "plan": Command(
        "tell what each compressor would send for a model, without training it",
        config=".plan:PlanConfig",
        function=".plan:plan_command",
    ),
    "kernels": Command(
        "time the arithmetic on each backend against memory and torch's operators, after checking it",
        config=".kernels:KernelsConfig",
        function=".kernels:kernels_command",
    ),
    "info": Command(
        "show versions, devices, kernel backends, process groups and network interfaces",
        config=".info:InfoConfig",
        function=".info:info",
    ),
}
