"""The meeting of ranks before they compare setups, at the first step and after a swap or load: without some, it fails."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist

from .lost_ranks import await_all, meet, place
from .protocol import Transport
from .rank_messages import exchange
from .torch_groups import store_of

HERE = "have come to their first bucket of gradients"
REMEDY = "compress the model on all ranks, with the same arguments; a rank may also be late, or have raised an error"
CHECK_EVERY = timedelta(seconds=1)  # between two checks of a rank that waits
SOON = 10.0  # seconds that a store is asked for the others; a collective would notice that one has died
SHORTEST, LONGEST = 0.001, 0.05  # seconds between two looks of a rank that agrees
Check: TypeAlias = Callable[[], None]


def nothing() -> None:
    """Do nothing: the check of a wait where there is no agreement to learn of."""


class Agreement:
    """The point where ranks meet before they compare their setups: at the first step, and after each change.

    They meet in their group's store, so those that go on without, and wait for those that do not come, find that out.
    `step`: the one that this rank is in since the start, counted alike on all ranks.
    """

    def __init__(self) -> None:
        self.step = 0
        self._round, self._world_size = 0, 0
        self._store: dist.Store | None = None  # until the first time, of which nobody can be unaware
        self.due = False  # this rank will meet the others at its next bucket
        self._differing = ""

    def barrier(self, transport: Transport, limit: timedelta) -> None:
        """Return when all ranks, always the same, have come here, or do not soon: what follows waits for them.

        `limit`: of the wait for ranks that do not come at the start. Raises ValueError where some go on without.
        """
        if self._differing:
            raise ValueError(self._differing)
        self.due = False
        if self._store is None:
            self._begin(transport, limit)
            return
        self._round += 1
        self._store.set(f"{self._round}/of {transport.ranks.rank}", "")
        self._store.set(f"{self._round}/begun", str(self.step))
        if self._store.add(f"{self._round}/met", 1) == self._world_size:
            self._store.set(f"{self._round}/all", "")
        self._await_all(self._store)

    def _begin(self, transport: Transport, limit: timedelta) -> None:
        await_all(transport.group, HERE, REMEDY, limit)
        texts = exchange(f"{uuid.uuid4().hex} {place()}", transport, what="the setup of their first bucket")
        keys, _, places = zip(*(text.partition(" ") for text in texts), strict=True)
        meet(transport.group, places)
        self._world_size = transport.ranks.world_size
        if type(store := store_of(transport.group)) is not dist.Store:  # which is MPI's placeholder
            self._store = dist.PrefixStore(f"gradwire/agreement/{keys[0]}/", store)

    def _await_all(self, store: dist.Store) -> None:
        deadline, pause = time.monotonic() + SOON, SHORTEST
        while time.monotonic() < deadline and not store.check([f"{self._round}/all"]):
            if store.check([f"{self._round}/differing"]):
                self._refuse(store.get(f"{self._round}/differing").decode())
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)

    def check(self) -> None:
        """Raise ValueError where others agree anew before a step that this rank has begun without."""
        store, other = self._store, self._round + 1
        if store is None or self.due:
            return
        try:
            if not store.check([f"{other}/begun"]) or int(store.get(f"{other}/begun")) > self.step:
                return
            text = _differing(self.step, *self._ranks(store, other))
        except RuntimeError:  # the store has gone, which is not what the wait is about
            return
        store.set(f"{other}/differing", text)
        self._refuse(text)

    def compare(self, transport: Transport, *, follows: bool) -> None:
        """Between steps, before ranks do more together: raise ValueError where some have a change to take up and others not.

        `follows`: the change is a state whose buckets this rank is about to make. A collective call.
        """
        mine = self.due + follows
        all_of_them = exchange(str(mine), transport, what="whether they have swapped the compressor or loaded a state")
        ranks, most = range(len(all_of_them)), max(all_of_them)
        if most != min(all_of_them):
            changed = [rank for rank in ranks if all_of_them[rank] == most]
            self._refuse(_differing(self.step + 1, changed, [rank for rank in ranks if rank not in changed]))

    def _refuse(self, text: str) -> None:
        self._differing = text
        raise ValueError(text)

    def _ranks(self, store: dist.Store, number: int) -> tuple[list[int], list[int]]:
        """Return the ranks that have come to meeting `number`, and the others."""
        ranks = range(self._world_size)
        here = [rank for rank in ranks if store.check([f"{number}/of {rank}"])]
        return here, [rank for rank in ranks if rank not in here]


def _differing(step: int, changed: list[int], unchanged: list[int]) -> str:
    return (
        f"the ranks were set up differently: before step {step} since the start ranks {changed} have swapped the "
        f"compressor or loaded a state, and ranks {unchanged} have not; do so on all ranks, at the same step"
    )
