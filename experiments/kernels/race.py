"""Time implementations of the same work turn by turn, from cold caches: what disturbs one disturbs all."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import torch

from ...ddp_core.measure.clock import clock_of
from ...kernels import use_backend

FEWEST = 3  # repeats, whatever they take
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
        """Return the seconds of the work, on threads that are at rest."""
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
    """Bytes of all last-level caches that the processors of this host share."""
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


@dataclass(frozen=True)
class Racer:
    """`work` is timed, on the named kernel backends; `prepare` comes before each repeat and is not. `cold`: never run."""

    work: Callable[[], object]
    backends: tuple[str, ...]
    prepare: Callable[[], object] = bool
    cold: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of the repeats and their quartiles."""

    median: float
    quartiles: tuple[float, float]
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """The summary of at least two repeats."""
        first, _, third = quantiles(seconds, n=4, method="inclusive")
        return cls(median(seconds), (first, third), len(seconds))


def race(racers: Mapping[str, Racer], clock: ColdClock, repeats: int, seconds: float) -> dict[str, Timing]:
    """Time all racers, one repeat of each a round.

    At most `repeats` rounds. Who has taken more than `seconds`, preparation included, is left out of those after the
    third, so that the slow do not keep the fast from being repeated. The first repeat of a cold racer does not count,
    unless it takes longer than that.
    """
    found: dict[str, list[float]] = {name: [] for name in racers}
    taken = dict.fromkeys(racers, 0.0)
    for name, racer in racers.items():
        if racer.cold and (first := _repeat(racer, clock)) > seconds:
            found[name].append(first)
    for done in range(max(repeats, FEWEST)):
        racing = deque(name for name in racers if len(found[name]) < FEWEST or taken[name] < seconds)
        racing.rotate(done)  # each is behind another each time
        for name in racing:
            start = time.monotonic()
            found[name].append(_repeat(racers[name], clock))
            taken[name] += time.monotonic() - start
    return {name: Timing.of(each) for name, each in found.items()}


def _repeat(racer: Racer, clock: ColdClock) -> float:
    racer.prepare()
    with use_backend(*racer.backends):
        return clock.seconds(racer.work)
