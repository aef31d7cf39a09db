"""The table of sub-commands: a new one is one entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Command:
    """A sub-command, imported when it is run.

    `function` is "module:attribute": a function from a dataclass, whose fields are the flags and the YAML keys, to the exit
    code. Its annotation says from which. A module that starts with a dot lies in `gradwire.experiments`.
    `defaults` is the YAML file that is used where no `--config` is given. `positional` names the fields that take the
    arguments without a flag, in order; where the last is a list it takes the rest, and all that follows a `--`.
    Help opens with the sentence `help` and the `examples`, and lists the options named `common` first.
    """

    help: str
    function: str
    examples: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    defaults: Path | None = None
    positional: tuple[str, ...] = ()

    def config_class(self) -> type[Any]:
        """The dataclass of the command's options."""
        found: type[Any] = next(iter(get_type_hints(self._imported()).values()))
        return found

    def run(self, config: object) -> int:
        """Run the command; its exit code."""
        return self._imported()(config)

    def _imported(self) -> Callable[[object], int]:
        module, _, attribute = self.function.partition(":")
        found: Callable[[object], int] = getattr(
            import_module(module, package=__package__.rpartition(".")[0]), attribute
        )
        return found


COMMANDS: dict[str, Command] = {
    "compare": Command(
        "Train one model with each compressor and compare loss, step time and bytes sent.",
        function=".compare.command:compare",
        examples=(
            "gradwire compare --steps 20",
            "gradwire compare --link 100mbit,none --compressors none,bf16,int4",
        ),
        common=("compressors", "model", "data", "link", "steps", "batch_size", "optimizer", "lr", "nproc", "out"),
        defaults=CONFIGS / "compare.yaml",
    ),
    "try": Command(
        "Run your own training script with each compressor and compare loss, step time and bytes sent.",
        function=".try_script:try_command",
        examples=(
            "gradwire try -- torchrun --nproc-per-node 2 train.py",
            "gradwire try --steps 500 --compressors none,int8,int4 -- torchrun --nproc-per-node 2 train.py",
        ),
        common=("compressors", "steps", "limit", "out", "json"),
        positional=("command",),
    ),
    "plan": Command(
        "Show how many bytes each compressor sends for a model, and the time it saves on a network, without training.",
        function=".plan:plan_command",
        examples=(
            "gradwire plan --model gpt-0.9m --compressors none,int8,int4 --workers 16",
            "gradwire plan --parameters 124M --hosts 2 --gpus-per-host 8 --rate 10gbit --step-seconds 0.12",
            "gradwire plan --parameters 1.2B --hosts 4 --parallel fsdp --rate 10gbit --step-seconds 0.5",
            "gradwire plan --model gpt-0.9m --sites 4 --up 110mbit --down 500mbit --step-seconds 0.1",
        ),
        common=(
            "compressors",
            "model",
            "parameters",
            "workers",
            "hosts",
            "gpus_per_host",
            "rate",
            "step_seconds",
            "json",
        ),
    ),
    "advise": Command(
        "Measure a DDP training and its network, and recommend whether and how to compress. For FSDP2 and accumulated "
        "micro-batches see gradwire plan.",
        function=".advise:advise_command",
        examples=(
            "torchrun --nproc-per-node 4 -m gradwire advise --model mine.py:build --optimizer adamw",
            "gradwire advise --model gpt-0.9m --optimizer adamw --link 1gbit --hosts 16,64",
        ),
        common=("model", "optimizer", "batch_size", "compressors", "hosts", "nproc", "json"),
    ),
    "check": Command(
        "Check averages, checkpoints and step times on the ranks and GPUs that you have, in two minutes.",
        function=".check.command:check_command",
        examples=("gradwire check --nproc 2", "torchrun --nproc-per-node 4 -m gradwire check --model mine.py:build"),
        common=("model", "batch_size", "steps", "compressors", "all", "nproc", "json"),
    ),
    "info": Command(
        "Show versions, devices, kernel backends, process groups and network interfaces of this host.",
        function=".info:info",
        examples=("gradwire info", "gradwire info --json"),
    ),
    "compressors": Command(
        "Print the description of each compressor, and its options with their defaults.",
        function=".compressor_help:compressors_command",
        examples=("gradwire compressors", "gradwire compressors int4 powersgd"),
        positional=("names",),
    ),
    "top": Command(
        "Show the ranks of a running training that calls handle.watch(folder=...): step time, bytes, stragglers.",
        function=".top:top",
        examples=("gradwire top runs/watch", "gradwire top runs/watch --once"),
        positional=("folder",),
    ),
    "rendezvous": Command(
        "Keep the address where sites that train by local SGD (gradwire.LocalSteps) meet, until Ctrl-C.",
        function=".rendezvous:rendezvous",
        examples=("gradwire rendezvous", "gradwire rendezvous --port 29500"),
    ),
    "bench": Command(
        "Time training steps with DistributedDataParallel over models, numbers of ranks and settings.",
        function=".bench.command:bench_command",
        examples=(
            "gradwire bench --models tiny --steps 5",
            "gradwire bench --models gpt-162m --ddp torch,gradwire --compressors none,int4 --json bench.json",
        ),
        common=("models", "ddp", "compressors", "batch_size", "steps", "warmup", "world_sizes", "nproc", "json"),
    ),
    "diff": Command(
        "Compare two files of gradwire bench --json, and optionally fail if the second is slower.",
        function=".bench.diff:diff_command",
        examples=("gradwire diff before.json after.json", "gradwire diff before.json after.json --fail-over 5"),
        positional=("base", "test"),
    ),
    "sweep": Command(
        "Run a study: one command at every point of a grid, with a table and pictures; finished points are kept.",
        function=".sweep.command:sweep_command",
        examples=(
            "gradwire sweep --config ddp-fig2-allreduce --short",
            "gradwire sweep --config ddp-fig2-allreduce --out runs/all-reduce",
        ),
        common=("config", "short", "out", "redraw", "limit", "only"),
    ),
    "kernels": Command(
        "Check the compressors' arithmetic on each backend, and time it against memory and torch's operators.",
        function=".kernels.command:kernels_command",
        examples=("gradwire kernels", "gradwire kernels --operations powersgd:rank=4,sign_pack --sizes 1M --threads 1"),
        common=("operations", "sizes", "backends", "limit", "all", "json"),
    ),
    "collective": Command(
        "Time all-reduces and other collectives by the size of their messages.",
        function=".collective.command:collective",
        examples=(
            "gradwire collective --total 10M",
            "gradwire collective --nproc 4 --operations all_reduce,all_gather --elements 10k,1M",
        ),
        common=("operations", "elements", "total", "nproc", "backend", "against", "json"),
    ),
    "ready": Command(
        "Time when each gradient of a backward pass is ready.",
        function=".ready:ready",
        examples=("gradwire ready --model gpt-0.9m", "gradwire ready --model mlp --steps 20 --json ready.json"),
        common=("model", "steps", "batch_size", "json"),
    ),
    "netlab": Command(
        "Run a command on emulated hosts, joined by links of a set bandwidth (Linux, root).",
        function=".network.lab.command:netlab_command",
        examples=(
            "gradwire netlab --hosts 4 --rate 100mbit -- python train.py",
            "gradwire netlab --hosts 4 --rate 110mbit --down 500mbit --delay 15ms --loss 0.1% -- python train.py",
            "gradwire netlab --clean",
        ),
        positional=("command",),
    ),
}
