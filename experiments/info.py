"""`gradwire info`: what there is on this host to train and to communicate with."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..ddp_core import obstacle
from ..ddp_core.transport.host_places import connections, pairs
from ..kernels import backends
from .network.interfaces import interfaces
from .results.files import environment

if TYPE_CHECKING:
    from rich.table import Table

LIBRARIES = ("gradwire", "torch", "numpy", "triton", "cupy")
PROCESS_GROUPS = ("gloo", "nccl", "mpi", "ucc", "xccl")
GIBIBYTE = 1024**3
BETWEEN = (  # kinds of `nvidia-smi topo -m`, and what they are
    ("NV", "NVLink"),
    ("PIX", "PCIe, one switch"),
    ("PXB", "PCIe, several switches"),
    ("PHB", "PCIe, by way of the processor"),
    ("NODE", "PCIe, by way of bridges of the processor"),
    ("SYS", "by way of the link between processors"),
    ("", "unknown"),
)


@dataclass(frozen=True)
class InfoConfig:
    """Versions, devices, kernel backends, process groups and network interfaces."""

    json: bool = False
    """print JSON instead of tables"""


def info(config: InfoConfig) -> int:
    """Print what there is; the command's exit code."""
    collected = collect()
    if config.json:
        print(json.dumps(collected, indent=2))
    else:
        from rich.console import Console  # here, since `collect` is used where it is not installed

        Console().print(*_tables(collected))
    return 0


def collect() -> dict[str, Any]:
    """Return all that `gradwire info` shows, ready for JSON.

    Memory is in bytes, link speeds in Mbit/s; None stands for what is not installed or not known.
    """
    return {
        "versions": versions(),
        "cpu": cpu(),
        "gpus": gpus(),
        "between_gpus": connections(),
        "peer_access": peer_access(),
        "kernels": [
            {"name": each.name, "device": each.device, "available": each.available, "reason": each.reason}
            for each in backends()
        ],
        "process_groups": process_groups(),
        "shared_memory": obstacle() or None,
        "interfaces": interfaces(),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that matter here; of CUDA and NCCL, those torch was built with."""
    nccl = torch.cuda.nccl.version() if dist.is_available() and dist.is_nccl_available() else ()
    return {
        "python": platform.python_version(),
        **{library: _version(library) for library in LIBRARIES},
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) or None,
    }


def _version(library: str) -> str | None:
    """By import name: some libraries come as distributions of several names, which takes long to find out."""
    if find_spec(library) is None:
        return None
    try:
        return version(library)
    except PackageNotFoundError:
        return next(map(version, packages_distributions().get(library, ())), None)


def cpu() -> dict[str, Any]:
    """The processor's model, its logical cores, those this process may use, and torch's threads."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": environment()["processor"],
        "cores": os.cpu_count(),
        "usable": usable,
        "torch_threads": torch.get_num_threads(),
    }


def gpus() -> list[dict[str, Any]]:
    """Name, memory and compute capability of each GPU that torch sees."""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": each.name, "memory_bytes": each.total_memory, "capability": f"{each.major}.{each.minor}"}
        for each in found
    ]


def peer_access() -> list[bool]:
    """Return for each pair of GPUs that torch sees if both reach the other's memory directly, over NVLink or PCIe."""
    reaches = torch.cuda.can_device_access_peer
    found = combinations(range(torch.cuda.device_count()), 2)
    return [reaches(one, other) and reaches(other, one) for one, other in found]


def process_groups() -> dict[str, bool]:
    """Return {backend of torch.distributed: True if this build of torch has it}."""
    checks = {name: getattr(dist, f"is_{name}_available", None) for name in PROCESS_GROUPS}
    return {name: bool(dist.is_available() and check and check()) for name, check in checks.items()}


def _tables(collected: Mapping[str, Any]) -> Iterator[Table]:
    yield _table("versions", {name: found or "not installed" for name, found in collected["versions"].items()}.items())
    yield _table("devices", _devices(collected["cpu"], collected["gpus"]))
    if len(collected["between_gpus"]) > 1:
        yield _table("between GPUs", _pairs(collected["between_gpus"], collected["peer_access"]))
    yield _table(
        "kernel backends",
        [(each["name"], each["device"], _yes(each["available"], each["reason"])) for each in collected["kernels"]],
    )
    groups = collected["process_groups"].items()
    yield _table("process groups", [(name, _yes(each, "not in this build of torch")) for name, each in groups])
    why = collected["shared_memory"]
    yield _table("without a network", [("shared memory", _yes(why is None, str(why)))])
    yield _table("network interfaces", [_link(**each) for each in collected["interfaces"]])


def _devices(processor: Mapping[str, Any], cards: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    cores = f"{processor['cores']} cores, {processor['usable']} usable, {processor['torch_threads']} torch threads"
    yield "CPU", processor["model"], cores
    for index, card in enumerate(cards):
        memory = f"{card['memory_bytes'] / GIBIBYTE:.0f} GiB"
        yield f"GPU {index}", card["name"], f"{memory}, compute capability {card['capability']}"


def _pairs(kinds: Mapping[str, Mapping[str, str]], direct: Sequence[bool]) -> Iterator[tuple[str, ...]]:
    """Yield the number of pairs of GPUs for each kind of connection, and for each way of their bytes."""
    for kind, count in pairs(kinds).items():
        yield kind, _counted(count), next(words for start, words in BETWEEN if kind.startswith(start))
    for words, count in (("direct peer access", sum(direct)), ("through host memory", len(direct) - sum(direct))):
        if count:
            yield "bytes", _counted(count), words


def _counted(count: int) -> str:
    return f"{count} pair{'s' * (count > 1)}"


def _link(name: str, state: str | None, addresses: list[str], speed_mbit: int | None) -> tuple[str, ...]:
    return name, state or "", " ".join(addresses), f"{speed_mbit} Mbit/s" if speed_mbit else "speed unknown"


def _yes(available: bool, reason: str) -> str:
    return "available" if available else f"not available: {reason}"


def _table(title: str, rows: Iterable[tuple[str, ...]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*map(escape, row))  # brackets, as of an extra to install, are no markup
    return table
