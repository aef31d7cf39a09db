"""A simulation of processes that compute on cores which they share, and wait for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias

ROUNDING = 1e-12  # seconds


@dataclass(frozen=True)
class Work:
    """The seconds of some work where nothing else runs, and the cores that are busy meanwhile; without cores it is sleep."""

    seconds: float = 0.0
    cores: float = 0.0


class Event:
    """An event that happens once, to the processes of a machine that wait for it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.happened = False
        self.waiting: list[Process] = []

    def happen(self) -> None:
        """Now."""
        self.happened = True
        self._machine.runnable += self.waiting
        self.waiting = []


Process: TypeAlias = Generator[Work | Event, None, None]


class Machine:
    """Processes on `cores` that they share: where they want more, all that want any get as much slower.

    A process yields the work that it does, or an event that it waits for. `now`: simulated seconds.
    """

    def __init__(self, cores: float) -> None:
        if not cores > 0:
            raise ValueError(f"a host has more than 0 cores, got {cores}")
        self.now = 0.0
        self.runnable: deque[Process] = deque()
        self._cores = cores
        self._working: dict[Process, tuple[float, float]] = {}  # seconds left where nothing else runs, and cores

    def start(self, process: Process) -> None:
        """One more, from now on."""
        self.runnable.append(process)

    def run(self) -> None:
        """Until no process can go on."""
        while self.runnable or self._working:
            while self.runnable:
                self._go_on(self.runnable.popleft())
            self._work()

    def _go_on(self, process: Process) -> None:
        """To its next work or wait."""
        for asked in process:
            if isinstance(asked, Work):
                if asked.seconds > ROUNDING:
                    self._working[process] = asked.seconds, asked.cores
                    return
            elif not asked.happened:
                asked.waiting.append(process)
                return

    def _work(self) -> None:
        """Until the first of those that work is done."""
        if not self._working:
            return
        wanted = sum(cores for _, cores in self._working.values())
        slower = max(1.0, wanted / self._cores)
        speeds = {process: self._speed(cores, slower) for process, (_, cores) in self._working.items()}
        passed = min(left / speeds[process] for process, (left, _) in self._working.items())
        self.now += passed
        for process, (left, cores) in list(self._working.items()):
            left -= passed * speeds[process]
            if left > ROUNDING:
                self._working[process] = left, cores
            else:
                del self._working[process]
                self.runnable.append(process)

    def _speed(self, cores: float, slower: float) -> float:
        """Return the speed of work that keeps `cores` busy: its computation gets slower, its waits do not."""
        computing = min(1.0, cores / min(1.0, self._cores))
        return 1.0 / (1.0 - computing + computing * slower)
