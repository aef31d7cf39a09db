"""Process groups that torch does not count: making one changes nothing for groups that the user makes later."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .protocol import Transport
from .rank_messages import exchange
from .torch_groups import known_to_torch, register_alike, store_of

CPU = torch.device("cpu")
_made: WeakKeyDictionary[dist.ProcessGroup, tuple[str, int]] = WeakKeyDictionary()


def new_name(transport: Transport) -> str:
    """A name for a private group: the same on all ranks that ask equally often. The first call is a collective one.

    torchrun may keep the store of ranks that it starts anew, and with it the addresses of dead ones; so a name has a part
    that no other life of these ranks has.
    """
    life, number = _made.get(transport.group) or (
        exchange(uuid.uuid4().hex, transport, what="the place where they meet")[0],
        0,
    )
    _made[transport.group] = life, number + 1
    return f"{life}/{number + 1}"


def private_group(
    parent: dist.ProcessGroup,
    timeout: timedelta,
    name: str,
    members: Sequence[int] = (),
    device: torch.device = CPU,
) -> dist.ProcessGroup:
    """A group of the ranks of `parent`, or of its `members`, known to its owner alone. A collective call of these.

    On CUDA it is of the kind of `parent`, elsewhere of Gloo.

    `torch.distributed.new_group` numbers all groups; made by some ranks only, it would have the ranks differ about the
    number of the next one, and that hangs. This group ends with its last reference. `parent` may be of any backend whose
    ranks meet in a store, under `name`. Raises RuntimeError where they do not, or not all of them within `timeout`.
    """
    store = store_of(parent)
    if type(store) is dist.Store:  # MPI's placeholder
        raise RuntimeError(
            "gradients on the CPU travel over Gloo, whose ranks meet in a store, and an MPI group has none: call "
            "init_process_group('gloo'); mpirun may start the ranks all the same"
        )
    store = dist.PrefixStore(f"gradwire/{name}/", store)
    ranks = members or range(parent.size())
    rank, size = ranks.index(parent.rank()), len(ranks)
    group = dist.ProcessGroup(store, rank, size)
    register_alike(group, parent, device, store, timeout)
    group._set_group_name(f"gradwire/{name}")  # type: ignore[arg-type]  # a NewType of str
    group._set_group_desc(f"gradwire: ranks {', '.join(map(str, ranks))}")
    return group


@contextmanager
def known_group(transport: Transport, timeout: timedelta, device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A private group that torch's functions take, inside the `with`. A collective call of all ranks of `transport`.

    `torch.distributed.new_group` may give the next group the name of one that was destroyed, and with it, in the store, the
    addresses of that one's ranks, which nobody answers at (torch 2.8).
    """
    group = private_group(transport.group, timeout, new_name(transport), device=device)
    with known_to_torch(group, transport.group):
        yield group


def meeting_place(group: dist.ProcessGroup, name: str) -> dist.Store:
    """Return a store for a group's ranks under a name, over its own connection: threads that wait on one take turns."""
    return dist.PrefixStore(f"gradwire/{name}/", store_of(group).clone())
