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
    `defaults` is the YAML file that is used where no `--config` is given. `positional` names the fields that take the
    arguments without a flag, in order; where the last is a list it takes the rest, and all that follows a `--`.
    """

    help: str
    config: str
    function: str
    defaults: Path | None = None
    positional: tuple[str, ...] = ()

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
    "bench": Command(
        "time training steps with DistributedDataParallel over models, world sizes and settings",
        config=".bench:BenchConfig",
        function=".bench:bench_command",
    ),
    "diff": Command(
        "compare two files of bench, and fail where the second is slower",
        config=".bench:DiffConfig",
        function=".bench:diff_command",
        positional=("base", "test"),
    ),
    "compare": Command(
        "train with each compressor and compare loss, speed and bytes on the wire",
        config=".compare:CompareConfig",
        function=".compare:compare",
        defaults=CONFIGS / "compare.yaml",
    ),
    "advise": Command(
        "measure a training and its network, and tell whether to compress, and how",
        config=".advise:AdviseConfig",
        function=".advise:advise_command",
    ),
    "plan": Command(
        "tell what each compressor would send for a model, without training it",
        config=".plan:PlanConfig",
        function=".plan:plan_command",
    ),
    "replay": Command(
        "predict the steps that bench measured on an emulated accelerator, and those of more hosts",
        config=".replay:ReplayConfig",
        function=".replay:replay_command",
        positional=("files",),
    ),
    "kernels": Command(
        "time the arithmetic on each backend against memory and torch's operators, after checking it",
        config=".kernels:KernelsConfig",
        function=".kernels:kernels_command",
    ),
    "sweep": Command(
        "run a study: a command on every point of a grid, with a table, pictures and a cache",
        config=".sweep:SweepConfig",
        function=".cli.study:sweep_command",
    ),
    "report": Command(
        "put any results into one HTML page that needs nothing beside it",
        config=".report:ReportConfig",
        function=".report:report_command",
        positional=("folders",),
    ),
    "collective": Command(
        "time all-reduces, all-gathers and reduce-scatters by the size of their pieces",
        config=".collective:CollectiveConfig",
        function=".collective:collective",
    ),
    "ready": Command(
        "time when each gradient of a backward pass is ready",
        config=".ready:ReadyConfig",
        function=".ready:ready",
    ),
    "trace": Command(
        "show how long each layer of a model takes, or measure it here, for an emulated accelerator",
        config=".workloads.emulation:TraceConfig",
        function=".workloads.emulation:trace_command",
        positional=("trace",),
    ),
    "netlab": Command(
        "run a command on hosts of one machine that are joined by links of a set rate (Linux, root)",
        config=".network.lab.command:NetlabCommandConfig",
        function=".network.lab.command:netlab_command",
        positional=("command",),
    ),
    "rendezvous": Command(
        "keep a place where sites meet that train by local steps",
        config=".rendezvous:RendezvousConfig",
        function=".rendezvous:rendezvous",
    ),
    "top": Command(
        "show the ranks of a running training: step rate, exposed time, bytes, stragglers",
        config=".top:TopConfig",
        function=".top:top",
        positional=("folder",),
    ),
    "info": Command(
        "show versions, devices, kernel backends, process groups and network interfaces",
        config=".info:InfoConfig",
        function=".info:info",
    ),
}
