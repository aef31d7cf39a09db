"""`gradwire check`: are the averages right and the steps faster on the ranks that a launcher, or this command, starts?"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch

from ...compress import compressor, compressors
from ...ddp_core import adopt_launcher
from ...ddp_core.transport.host_places import pairs
from ..advice.candidates import CANDIDATES
from ..bench.config import BenchConfig
from ..bench.rows import row
from ..bench.run import measure
from ..bench.trial import Setup
from ..bench.world import World, join_world
from ..info import collect
from ..network.lab import backend_here, rerun_on_hosts
from ..network.ranks_config import RanksConfig
from ..ranks.device import chosen_backend, device_here
from ..ranks.launchers import threads_here
from ..ranks.processes import RankFailure, run_ranks
from ..ranks.stopping import INTERRUPTED, sigterm_interrupts
from ..results.files import check_file, figures_document, write_json
from .averages import WrongResult, check_averages, check_resumed, check_swapped
from .show import averages_table, heading, steps_table

TIMED = ["none", "bf16", "int8", "int4"]
WRAPPER = "hosts"  # means the same as no compressor if it is alone
MODELS = {"cpu": "mlp", "cuda": "gpt-162m"}
WARM_UP = 5  # steps
FEWEST_RANKS = 2


@dataclass(frozen=True)
class CheckConfig(RanksConfig):
    """Check averages, checkpoints and step times on these ranks."""

    model: str | None = None
    """model whose step is timed: one of gradwire bench, or FILE.py:FUNCTION; gpt-162m on GPUs and mlp on CPUs if not
    given"""
    batch_size: int = 8
    """samples per rank and step; a model of your own has its own batch"""
    steps: int = 10
    """number of timed steps for each compressor"""
    bucket_mb: float | None = None
    """DDP's bucket size in MiB; null gives 1 for the first bucket and 25 for the others"""
    compressors: list[str] = field(default_factory=list)
    """compressors whose averages are checked, separated by commas; if not given, the recommended ones"""
    all: bool = False
    """check the averages of all compressors"""
    json: str | None = None
    """write all figures to this file"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for spec in self.compressors:
            compressor(spec)
        if self.all and self.compressors:
            raise ValueError(f"--all checks all compressors: leave out --compressors, got {','.join(self.compressors)}")
        self.timing("cpu", [])
        check_file("json", self.json)

    def checked(self, per_host: int, hosts: int) -> list[str]:
        """Return the compressors whose averages are checked, `hosts+` among them if ranks share a host.

        Hosts of two are among them where one host has all ranks: with all in one, nothing is compressed.
        """
        if self.compressors:
            return self.compressors
        alone = [name for name in compressors() if name != WRAPPER] if self.all else [each.spec for each in CANDIDATES]
        halves = _on_hosts(["int4"], 2) if hosts == 1 and per_host > 2 and per_host % 2 == 0 else []
        return [*alone, *_on_hosts(["int4"], per_host), *halves]

    def timing(self, device: str, specs: list[str]) -> BenchConfig:
        """Return the options of bench for the same steps."""
        settings: dict[str, Any] = {"batch_size": self.batch_size, "steps": self.steps, "warmup": WARM_UP}
        settings["bucket_mb"] = [] if self.bucket_mb is None else [self.bucket_mb]
        models = [self.model or MODELS[device]]
        return BenchConfig(models=models, compressors=specs or TIMED, nproc=self.nproc, **settings)


def _on_hosts(specs: list[str], per_host: int) -> list[str]:
    return [f"hosts:ranks={per_host}+{spec}" for spec in specs] if per_host > 1 else []


def check_command(config: CheckConfig) -> int:
    """Check the ranks; the command's exit code: 1 with one sentence if something is not right."""
    if (code := rerun_on_hosts(config.netlab)) is not None:
        return code
    launched = adopt_launcher() is not None
    ranks = int(os.environ["WORLD_SIZE"]) if launched else config.nproc
    if ranks < FEWEST_RANKS:
        raise ValueError(f"a check needs two ranks or more, and there is {ranks}: --nproc 2, or start it with torchrun")
    wanted = backend_here(config.backend)
    backend = chosen_backend(wanted, int(os.environ.get("LOCAL_WORLD_SIZE", config.nproc)))
    if launched:
        return _told(lambda names: run_rank(int(os.environ["RANK"]), None, config, backend, names))
    with sigterm_interrupts():
        return _told(lambda _: run_ranks(run_rank, config.nproc, config, backend))


def _told(check: Callable[[set[str]], None]) -> int:
    """Run a check and return the exit code; ranks other than the first are silent about what all of them found.

    The check adds the names of hosts to its argument. No sentence shows them.
    """
    names = {socket.gethostname(), os.environ.get("MASTER_ADDR", "localhost")}
    try:
        check(names)
    except KeyboardInterrupt:
        return INTERRUPTED
    except RankFailure as failure:
        return _wrong(sentence(str(failure)), names)
    except (WrongResult, RuntimeError, ValueError) as error:
        return _wrong(" ".join(str(error).split()), names) if os.environ["RANK"] == "0" else 1
    return 0


def _wrong(told: str, names: set[str]) -> int:
    print(f"\nNOT RIGHT: {without_addresses(told, names)}", file=sys.stderr)
    return 1


def without_addresses(told: str, names: Set[str]) -> str:
    """Return a sentence with `[address]` in place of addresses and of the hosts' names, also with their domains."""

    def known(word: str) -> bool:
        with suppress(ValueError):
            return not names.isdisjoint((word, word.partition(".")[0])) or bool(ip_address(word))
        return False

    def replaced(found: re.Match[str]) -> str:
        word = found[0].rstrip(".:")
        hidden = word.startswith("[") or known(word) or known(word.rpartition(":")[0])
        return f"[address]{found[0][len(word) :]}" if hidden else found[0]

    return re.sub(r"\[[^\]\s]+\]:\d+|[\w.:%-]+", replaced, told)


def sentence(failure: str) -> str:
    """Return what a failure of ranks says: a rank that was killed, else the error at the end of its traceback."""
    first, *_, last = failure.strip().splitlines() * 2
    return first if first.endswith("SIGKILL") else f"{first.rstrip(':')}: {last.partition(': ')[2] or last}"


def run_rank(
    rank: int, rendezvous: dict[str, Any] | None, config: CheckConfig, backend: str, names: set[str] | None = None
) -> None:
    """This rank's part; the first one shows and writes. Raises WrongResult on all ranks for the first thing wrong.

    `names`: takes the names of all hosts.
    """
    os.environ.setdefault("LOCAL_RANK", str(rank))
    torch.set_num_threads(threads_here(config.threads, config.nproc))
    about, limit = (int(os.environ["LOCAL_RANK"]), socket.gethostname()), timedelta(seconds=config.timeout)
    world = join_world(rendezvous, backend, device_here(backend), limit, about)
    if names is not None:
        names.update(world.hosts)
    document, began = _document(config, world), time.monotonic()
    with world.joined(world.size, "check"):
        for lines in _checks(config, world, document):
            if rank == 0:
                print(*lines, sep="\n", flush=True)
                if config.json:
                    write_json(document, config.json)
    world.leave()
    if rank == 0:
        print(f"\nAll is right. The check took {time.monotonic() - began:.0f} s.")


def _checks(config: CheckConfig, world: World, document: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of each part, whose figures are in the document then. A collective call."""
    yield heading(document)
    per_host = document["topology"]["ranks_per_host"]
    for spec in config.checked(per_host, document["topology"]["hosts"]):
        if (errors := check_averages(spec, world.device)) is not None:
            found, expected = map(asdict, errors)
            document["averages"].append({"compressor": spec, "found": found, "expected": expected})
    yield averages_table(document["averages"])
    check_resumed(world.device)
    check_swapped(world.device)
    yield ["", "All ranks end with the same bits. A save and a load keep every bit. A swap loses nothing."]
    timing = config.timing(world.device.type, [*TIMED, *_on_hosts(TIMED[1:], per_host)])
    task, placement = timing.tasks()[0], world.placement(world.size)
    setup = Setup(task, timing.batch_size, timing.seed, world.device, world.timeout)
    for case, measured in measure(timing.cases(), setup, timing, world, lambda turn: None):
        document["rows"].append(row(task.name, timing.batch_size, case, placement, measured, timing))
    yield steps_table(document["rows"], task.size, timing.steps)


def _document(config: CheckConfig, world: World) -> dict[str, Any]:
    """Return the contents of the file before any check, without names of hosts, folders and users."""
    place, about = world.placement(world.size), collect()
    document = figures_document("check", replace(config, json=None), [])
    document["config"]["model"] = config.model and Path(config.model).name
    del document["command"], about["interfaces"]
    usable = [each["name"] for each in about["kernels"] if each["available"]]
    document["environment"] = {**about, "between_gpus": pairs(about["between_gpus"]), "kernels": usable}
    document["topology"] = {
        "ranks": world.size,
        "hosts": len(set(world.hosts)),
        "ranks_per_host": world.size // place.machines if world.size % place.machines == 0 else 1,
        "backend": world.backend,
        "device": world.device.type,
    }
    return {**document, "averages": []}
