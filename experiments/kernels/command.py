"""The command: what to measure, and what to show of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch

from ...kernels import Backend, backends
from ..ranks.stopping import INTERRUPTED, sigterm_interrupts
from ..results.files import check_file, figures_document, write_json
from ..results.rows import elements_of
from .bench import Bench, Group, Limit, Row, copy_bytes_per_second
from .cases import Case, chosen_cases
from .low_rank import SMALLEST
from .race import FEWEST
from .report import notes, progress, show

SIZES = ("1M", "6.5536M", "64M")  # the second: 25 MiB of float32, a bucket of DDP
LARGER_SIZES = ("256M",)  # on GPUs, whose caches are larger


@dataclass(frozen=True)
class KernelsConfig:
    """Time each operation on each backend, check it first, and compare with memory and with torch's operators."""

    operations: list[str] = field(default_factory=list)
    """operations or compressors to time, such as powersgd:rank=4; all if not given"""
    backends: list[str] = field(default_factory=list)
    """kernel backends to time, such as native,reference; all that work on the device if not given"""
    sizes: list[str] = field(default_factory=list)
    """numbers of elements of a bucket, such as 100k or 6.5536M; 1M, 6.5536M, 64M and on GPUs 256M if not given"""
    dtypes: list[Literal["fp32", "bf16", "fp16"]] = field(default_factory=lambda: ["fp32"])
    """dtypes of the bucket, for operations that take it"""
    threads: list[int] = field(default_factory=list)
    """numbers of torch threads; 1 and all if not given, on GPUs all"""
    repeats: int = 15
    """largest number of repeats of each measurement"""
    seconds: float = 0.3
    """time after which a measurement is not repeated any more, in seconds; three repeats always run"""
    limit: float = 60.0
    """time for all measurements in seconds; jobs that do not fit are left out and listed"""
    all: bool = False
    """measure everything, however long it takes"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device to measure on; auto takes a CUDA device if there is one"""
    json: str | None = None
    """write all figures to this file"""

    def __post_init__(self) -> None:
        chosen_cases(self.operations)
        for size in self.sizes:
            elements_of(size, SMALLEST)
        if too_few := [count for count in self.threads if count < 1]:
            raise ValueError(f"threads are at least 1, got {too_few[0]}")
        if self.repeats < FEWEST:
            raise ValueError(f"repeats is at least {FEWEST}, got {self.repeats}")
        if not self.seconds >= 0:
            raise ValueError(f"seconds is at least 0, got {self.seconds}")
        if not self.limit > 0:
            raise ValueError(f"limit is above 0 seconds, got {self.limit}; --all sets none")
        if not self.dtypes:
            raise ValueError("dtypes is empty: name at least one of fp32, bf16, fp16")
        check_file("json", self.json)


def kernels_command(config: KernelsConfig) -> int:
    """Measure, show and write; the exit code: 1 where a backend is wrong.

    Ctrl-C ends the measurement only: the rows until then are shown and written, and the exit code is 130.
    """
    limit, device = Limit(math.inf if config.all else config.limit), chosen_device(config.device)
    used, skipped = chosen_backends(config.backends, device)
    groups, left_out = planned(config, device, used)
    bench = Bench(device, config.repeats, config.seconds, max(group.elements for group in groups), skipped + left_out)
    rows, stopped = measured(bench, groups, limit)
    bench.skipped += limit.told()
    if not rows and stopped:
        return INTERRUPTED
    if not rows:
        raise ValueError(f"nothing was measured: {'; '.join(bench.skipped)}")
    show(rows)
    print(*notes(rows, bench.skipped, bench.machine), sep="\n")
    if config.json:
        document = figures_document("kernels", config, [asdict(row) for row in rows])
        document |= {"environment": bench.machine, "copy_bytes_per_second": copy_bytes_per_second(rows)}
        write_json(document, config.json)
        print(f"figures    {config.json}")
    return INTERRUPTED if stopped else int(any(not row.correct for row in rows))


def chosen_device(name: str) -> torch.device:
    """The device to measure on."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device here; measure on --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def chosen_backends(names: Sequence[str], device: torch.device) -> tuple[tuple[str, ...], list[str]]:
    """The backends to measure, and why others are not.

    Raises ValueError where one that is asked for is unknown or does not run on the device.
    """
    known = {each.name: each for each in backends()}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown kernel backend {name!r}; there are: {', '.join(known)}")
        if reason := _unfit(known[name], device):
            raise ValueError(f"the kernel backend {name!r} cannot be measured here: {reason}")
    if names:
        return tuple(dict.fromkeys(names)), []
    used = [each.name for each in known.values() if each.automatic and not _unfit(each, device)]
    reasons = {each.name: _unfit(each, device) or "runs only when it is asked for" for each in known.values()}
    return tuple(used), [f"{name}: {reason}" for name, reason in reasons.items() if name not in used]


def _unfit(backend: Backend, device: torch.device) -> str:
    """Why a backend does not run on a device; empty where it does."""
    if backend.device not in (device.type, "any"):
        return f"it is for {backend.device} tensors"
    return backend.reason


def planned(config: KernelsConfig, device: torch.device, used: tuple[str, ...]) -> tuple[list[Group], list[str]]:
    """Return the groups to measure, in order of size, and lines on jobs that do not exist."""
    default = SIZES + (LARGER_SIZES if device.type == "cuda" else ())
    every = torch.get_num_threads()
    threads = tuple(dict.fromkeys(config.threads or ([every] if device.type == "cuda" else [1, every])))
    cases = chosen_cases(config.operations)
    groups = [
        Group(case, size, dtype, threads, _having(case, used))
        for size in dict.fromkeys(map(elements_of, config.sizes or default))
        for dtype in dict.fromkeys(config.dtypes)
        for case in cases
        if dtype in case.dtypes and _having(case, used)
    ]
    wanted = {(case.name, dtype) for case in cases for dtype in config.dtypes}
    missing = wanted - {(group.case.name, group.dtype) for group in groups}
    lines = [f"{name} of {dtype}: no backend asked for has it" for name, dtype in sorted(missing)]
    if not groups:
        raise ValueError(f"nothing to measure: {'; '.join(lines)}")
    return groups, lines


def _having(case: Case, used: tuple[str, ...]) -> tuple[str, ...]:
    """The backends that have any of a case's operations."""
    return tuple(name for name in used if any(name in each.implementations for each in case.operations))


def measured(bench: Bench, groups: Sequence[Group], limit: Limit) -> tuple[list[Row], bool]:
    """Return the rows within the limit, or those until Ctrl-C, and True if that ended it; a bar shows how far it is."""
    rows: list[Row] = []
    try:
        with sigterm_interrupts(), progress(sum(len(group.threads) for group in groups)) as advance:
            for group in limit.admit(groups):
                advance(0, f"{group.case.name}, {group.elements:,} elements, {group.dtype}")
                for found in bench.measure(group):
                    rows += found
                    advance(1, None)
    except KeyboardInterrupt:
        print("\nstopped; finished results are kept", file=sys.stderr)
        return rows, True
    return rows, False
