"""Waits for all ranks at a call that all of them must make, and names those that do not come."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .backends import store_of
from .processes import ended_ranks

logger = logging.getLogger(__name__)
PATIENCE = 5.0  # seconds until the missing ranks are named
SHORTEST, LONGEST = 0.001, 0.05  # seconds between two looks
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # so far, by group; alike on all ranks


def await_all(group: dist.ProcessGroup, call: str, timeout: timedelta) -> None:
    """Return when all ranks of the group have made this call. Log which are missing after some seconds.

    Raises RuntimeError if some have not come within `timeout`, or if a rank of this host has ended. Without a store, as in
    MPI groups, it does not wait.
    """
    _calls[group] = number = _calls.get(group, 0) + 1
    if type(own := store_of(group)) is dist.Store:  # MPI's placeholder
        return
    store, rank, ranks = dist.PrefixStore("gradwire/presence/", own), group.rank(), group.size()
    store.set(f"at/{rank}", str(number))
    if store.add(f"met/{number}", 1) == ranks:
        store.set(f"all/{number}", "")
        for key in (f"met/{number - 1}", f"all/{number - 1}"):  # which nobody waits for any more
            store.delete_key(key)
        return
    began, pause, warned = time.monotonic(), SHORTEST, False
    while not store.check([f"all/{number}"]):
        waited = time.monotonic() - began
        ended = ended_ranks(group) if pause == LONGEST else []
        if ended or waited > timeout.total_seconds():
            message = _missing(store, number, ranks, call, waited)
            if ended:
                message = f"ranks {ended} have ended. {message}"
            store.add(f"met/{number}", -1)  # so that this rank may call again
            store.set(f"at/{rank}", str(number - 1))
            _calls[group] = number - 1
            raise RuntimeError(f"gave up: {message}")
        if waited > PATIENCE and not warned:
            warned = True
            if rank == min(_present(store, number, ranks)):
                logger.warning("%s", _missing(store, number, ranks, call, waited))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)


def _present(store: dist.Store, number: int, ranks: int) -> list[int]:
    """The ranks that have made the call."""
    keys = [f"at/{rank}" for rank in range(ranks)]
    return [rank for rank, key in enumerate(keys) if store.check([key]) and int(store.get(key)) >= number]


def _missing(store: dist.Store, number: int, ranks: int, call: str, seconds: float) -> str:
    present = _present(store, number, ranks)
    missing = [rank for rank in range(ranks) if rank not in present]
    return (
        f"ranks {present} have called {call}() and waited {seconds:.0f} s for ranks {missing}, which have not: all ranks "
        f"must call {call}(), also where only the first one saves; take the call out of `if rank == 0:`"
    )
