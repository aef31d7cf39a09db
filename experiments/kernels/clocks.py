"""Seconds of work that finds nothing in a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...ddp_core.measure.clock import clock_of

CACHES = Path("/sys/devices/system/cpu")
ASSUMED_CACHE = 2**26  # bytes of the last level where the system does not tell
EVICTION = 4  # times the last level: what is written so that nothing else is left there
ASLEEP = 10**7  # cycles that a device sleeps while the host queues the work: 5 ms of an H100, some hundred launches
PAUSE = 0.01  # seconds; torch's threads wait actively for some milliseconds after their work, and would take a core


class ColdClock:
    """A device's clock for work from cold caches. `cache_bytes`: of the last-level cache.

    On a GPU the clock starts when the host has queued the work: what launches cost does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock, self._on_gpu = clock_of(device), device.type == "cuda"
        self.cache_bytes = torch.cuda.get_device_properties().L2_cache_size if self._on_gpu else last_level_cache()
        self._written = torch.zeros(EVICTION * self.cache_bytes, dtype=torch.uint8, device=device)

    def seconds(self, work: Callable[[], object]) -> float:
        """How long the work takes, on threads that are at rest."""
        self._written.add_(1)
        if self._on_gpu:
            torch.cuda._sleep(ASLEEP)
        elif torch.get_num_threads() > 1:
            time.sleep(PAUSE)
        begin = self._clock.now()
        work()
        end = self._clock.now()
        self._clock.synchronize()
        return self._clock.seconds(begin, end)


def last_level_cache(root: Path = CACHES) -> int:
    """Bytes of all last-level caches that the processors of this machine share."""
    found: dict[tuple[int, str], int] = {}  # (level, the processors that share it)
    for folder in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, shared, size = ((folder / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
        found[int(level), shared] = int(size.removesuffix("K")) * 1024
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or ASSUMED_CACHE


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run on so many of torch's threads inside a `with`."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
