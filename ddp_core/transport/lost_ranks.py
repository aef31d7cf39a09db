"""The processes of ranks: who has ended, which a lost connection does not tell, and who has not made a call of all ranks."""

from __future__ import annotations

import functools
import logging
import os
import select
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from .torch_groups import store_of

BOOT, SPACES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns")
CHECK_SECONDS = 0.2  # between two checks that the other ranks still live
SOON = 0.5  # seconds within which a process has ended whose connections were lost, on a busy machine too
_known: WeakKeyDictionary[dist.ProcessGroup, Mapping[int, int]] = WeakKeyDictionary()  # {rank: process} on this machine
_met: WeakSet[dist.ProcessGroup] = WeakSet()  # groups all of whose ranks are known
logger = logging.getLogger(__name__)
PATIENCE = 5.0  # seconds until the missing ranks are named
SHORTEST, LONGEST = 0.001, 0.05  # seconds between two looks
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # so far, by group; alike on all ranks


@functools.cache
def extension() -> Any:
    """Sums and processes in C++; ImportError where they were not built."""
    return import_module("._shared_memory", __package__)


def close_files(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


class Processes:
    """Other ranks on this machine. `processes`: of each."""

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._ranks: dict[int, int] = {}  # by the number of a file that stands for the process
        weakref.finalize(self, close_files, self._ranks).atexit = False  # others may look until the end
        for rank, process in processes.items():
            self._ranks[extension().process_file(process)] = rank

    def ended(self, seconds: float = 0.0) -> list[int]:
        """Return the ranks whose processes are gone. Wait up to `seconds` for a first one."""
        poll = select.poll()  # one for each call: threads may not share them
        for file in self._ranks:
            poll.register(file, select.POLLIN)
        return sorted(self._ranks[file] for file, _ in poll.poll(1000 * seconds))


def machine() -> str:
    """The machine, its network and its processes as this one sees them, without spaces; OSError where these are unknown."""
    return ",".join([BOOT.read_text().strip(), *(os.readlink(SPACES / kind) for kind in ("net", "pid"))])


def place() -> str:
    """This process and its machine, for other ranks; empty where the system does not say."""
    try:
        return f"{machine()} {os.getpid()}"
    except OSError:
        return ""


def meet(group: dist.ProcessGroup, places: Sequence[str]) -> None:
    """Remember the ranks of a group that share this one's machine, for good. `places`: of each rank."""
    _know(group, places)
    _met.add(group)


def _know(group: dist.ProcessGroup, places: Sequence[str]) -> None:
    known = {rank: each.split() for rank, each in enumerate(places) if each}
    here, process = known.get(group.rank(), ("", ""))
    _known[group] = {rank: int(its) for rank, (there, its) in known.items() if there == here and its != process}


def announce(group: dist.ProcessGroup) -> None:
    """Leave this rank's process in the group's store, so that ranks which wait for this one notice its end."""
    if (store := _presence(group)) is not None:
        store.set(f"process/{group.rank()}", place())


def _presence(group: dist.ProcessGroup) -> dist.Store | None:
    """Return the store of who is where; None without one, as in MPI groups."""
    own = store_of(group)
    return None if type(own) is dist.Store else dist.PrefixStore("gradwire/presence/", own)  # MPI's is a placeholder


def explained(error: BaseException, group: dist.ProcessGroup) -> str:
    """Return the text of an error, and the ranks of this machine that have ended, unless the text reports that.

    NCCL's own errors do not show which rank has failed: what to look for stands behind them.
    """
    if "has ended" in str(error):
        return str(error)
    patience = 0.0 if "imed out" in str(error) else SOON  # whoever let a time limit pass did not end just now
    ended = ended_ranks(group, patience)
    with suppress(KeyError, ValueError):  # a group that torch does not know has numbers of its own
        ended = [dist.get_process_group_ranks(group)[rank] for rank in ended]
    if ended:
        return f"{error}; " + (f"rank {ended[0]} has ended" if len(ended) == 1 else f"ranks {ended} have ended")
    lost = isinstance(error, dist.DistBackendError)
    return f"{error}; look for the error of the rank that failed first" if lost else str(error)


def ended_ranks(group: dist.ProcessGroup, seconds: float = 0.0) -> list[int]:
    """Return the ranks of a group on this machine whose processes have ended, as far as they are known.

    It waits up to `seconds` for a first one.
    """
    known = _known.get(group, {})
    ended = _gone(known)
    alive = {rank: process for rank, process in known.items() if rank not in ended}
    with suppress(ImportError, AttributeError, OSError):  # not built, of another version, or gone meanwhile
        ended += Processes(alive).ended(0.0 if ended else seconds) if alive else []
    return sorted({*ended, *_gone(known)})


def _gone(known: Mapping[int, int]) -> list[int]:
    """Return the ranks whose processes do not exist any more, not even as zombies."""
    return [rank for rank, process in known.items() if not Path(f"/proc/{process}").exists()]


def await_all(group: dist.ProcessGroup, did: str, remedy: str, timeout: timedelta) -> None:
    """Return when all ranks of the group have come here. Log which are missing after some seconds, and what to do.

    `did`: what ranks that are here have done, for messages.

    Raises RuntimeError if some have not come within `timeout`, or if a rank of this host has ended: of ranks that have not
    met yet, those that were announced. Without a store, as in MPI groups, it does not wait.
    """
    _calls[group] = number = _calls.get(group, 0) + 1
    if (store := _presence(group)) is None:
        return
    rank, ranks = group.rank(), group.size()
    store.set(f"at/{rank}", str(number))
    if store.add(f"met/{number}", 1) == ranks:
        store.set(f"all/{number}", "")
        for key in (f"met/{number - 1}", f"all/{number - 1}"):  # which nobody waits for any more
            store.delete_key(key)
        return
    began, pause, look = time.monotonic(), SHORTEST, PATIENCE
    while not store.check([f"all/{number}"]):
        waited = time.monotonic() - began
        ended = ended_ranks(group) if pause == LONGEST else []
        if ended or waited > timeout.total_seconds():
            message = _missing(store, number, ranks, did, remedy, waited)
            if ended:
                message = f"ranks {ended} have ended. {message}"
            store.add(f"met/{number}", -1)  # so that this rank may call again
            store.set(f"at/{rank}", str(number - 1))
            _calls[group] = number - 1
            raise RuntimeError(f"gave up: {message}")
        if waited > look:
            if group not in _met:  # ranks may announce themselves at any time
                _know(group, _announced(store, ranks))
            if look == PATIENCE and rank == min(_present(store, number, ranks)):
                logger.warning("%s", _missing(store, number, ranks, did, remedy, waited))
            look *= 2
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)


def _announced(store: dist.Store, ranks: int) -> list[str]:
    keys = [f"process/{rank}" for rank in range(ranks)]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]


def _present(store: dist.Store, number: int, ranks: int) -> list[int]:
    """The ranks that have made the call."""
    keys = [f"at/{rank}" for rank in range(ranks)]
    return [rank for rank, key in enumerate(keys) if store.check([key]) and int(store.get(key)) >= number]


def _missing(store: dist.Store, number: int, ranks: int, did: str, remedy: str, seconds: float) -> str:
    present = _present(store, number, ranks)
    missing = [rank for rank in range(ranks) if rank not in present]
    if not missing:  # one stopped behind its mark
        return f"all ranks {did}, and have waited {seconds:.0f} s for one of them, which hangs or has died"
    return f"ranks {present} {did} and waited {seconds:.0f} s for ranks {missing}, which have not: {remedy}"
