"""Process groups as torch has them inside: kinds of backends, their waits, stores. No other file knows such details."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .protocol import DEFAULT_TIMEOUT

logger = logging.getLogger(__name__)
BY_STREAMS = ("nccl", "rccl", "ucc")  # beginnings of names of backends: a GPU's streams wait for their collectives
NCCL = ("nccl", "nccl2")  # names of torch's own; the second one since torch 2.15
BY_HOST = ("gloo", "mpi")  # the host waits for theirs
TIMED = {  # classes of backends whose work takes a time limit in wait(); torchcomms' wrapper refuses it
    "DirectBackend",
    "ProcessGroupGloo",
    "ProcessGroupMPI",
    "ProcessGroupNCCL",
    "ProcessGroupNCCL2",
    "ProcessGroupUCC",
    "ProcessGroupXCCL",
    "_ProcessGroupWrapper",
}
SHORTEST, LONGEST = 5e-5, 2e-3  # seconds between two looks at a work
OLDER = not hasattr(dist.ProcessGroup, "all_gather_single")  # a torch with other names for these methods of groups
ALL_GATHER, ALL_TO_ALL = ("_allgather_base", "alltoall_base") if OLDER else ("all_gather_single", "all_to_all_single")


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that carries a group's tensors on a device."""
    return str(group._get_backend(device).name()).lower()


def orders_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if streams wait for a group's replies on a device, and the host never does: NCCL, and others of GPUs.

    The class of the backend and its name have to agree. For unknown backends the host waits, which is right for both kinds.
    """
    if device.type != "cuda":
        return False
    classes = [each.__name__.lower().removeprefix("processgroup") for each in type(group._get_backend(device)).__mro__]
    names = [*classes, name := backend_name(group, device)]
    found = [each.startswith(BY_STREAMS) for each in names if each.startswith((*BY_STREAMS, *BY_HOST))]
    if not found:
        _log_unknown(name)
    return bool(found) and all(found)


@cache  # so that each is logged once
def _log_unknown(name: str) -> None:
    logger.warning(
        "gradwire does not know the backend %s: on GPUs it is used as one for which the host waits, which may be slower",
        name,
    )


def takes_time_limits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if works of a group take a time limit in `wait()`."""
    return type(group._get_backend(device)).__name__ in TIMED


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the GPU that a group of GPUs is bound to on this rank; else the current one, which its collectives use."""
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    return bound or torch.device("cuda")


def carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if a group has a backend for tensors on such a device."""
    return any(each.type == device.type for each in group._device_types)


def message_limit(group: dist.ProcessGroup, device: torch.device, otherwise: timedelta) -> timedelta:
    """Return the time limit of a group's own; `otherwise` for backends in Python, of which torch asks it without an end."""
    in_python = type(group._get_backend(device)).__name__ not in TIMED - {"DirectBackend"}
    return otherwise if in_python else time_limit_of(group, device, otherwise)


def group_limit(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of a group's own on the CPU, or on GPUs if it is of GPUs alone."""
    device = torch.device("cpu" if carries(group, torch.device("cpu")) else "cuda")
    own: timedelta | None = getattr(group._get_backend(device), "limit", None)  # of the backend `gradwire`
    return own or message_limit(group, device, DEFAULT_TIMEOUT)


def polled(work: dist.Work, seconds: float) -> bool:
    """Wait for a work on the CPU that takes no time limit. Raises RuntimeError at the limit."""
    deadline, pause = time.monotonic() + seconds, SHORTEST
    while not work.is_completed():
        if time.monotonic() >= deadline:
            raise RuntimeError(f"the collective has not ended within {seconds:.3f} s")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
    return work.wait()


def notes_aside(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if futures of a GPU's group run on streams behind its works; nccl2's make the current stream wait."""
    aside = backend_name(group, device) != "nccl2"
    if not aside:
        log_no_future("those of nccl2 make the current stream wait")
    return aside


@cache  # so that the same reason is logged once
def log_no_future(reason: str) -> None:
    """Say that works of a backend have no futures."""
    logger.info("the times at which averages arrive are not measured: the backend gives no futures (%s)", reason)


def register_alike(
    group: dist.ProcessGroup, parent: dist.ProcessGroup, device: torch.device, store: dist.Store, timeout: timedelta
) -> None:
    """Give a new group a backend for a device: on GPUs the parent's kind, on the CPU Gloo.

    Raises RuntimeError for a kind that it cannot make, since another one would carry gradients elsewhere.
    """
    rank, size, types = group.rank(), group.size(), dist.ProcessGroup.BackendType
    kind = backend_name(parent, device) if device.type == "cuda" else "gloo"
    if kind in NCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = time_limit_of(parent, device, timeout)
        made = getattr(dist, f"ProcessGroup{kind.upper()}")
        bound = (device,) if kind == "nccl2" else ()  # which must know its device
        group._register_backend(device, types.NCCL, made(store, rank, size, options, *bound))
    elif kind == "gloo":
        group._register_backend(device, types.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout))
    else:
        raise RuntimeError(
            f"gradwire needs a process group of its own for {device.type} tensors, and makes such groups of NCCL and Gloo; "
            f"the model's group has {kind} there. Call init_process_group('cpu:gloo,cuda:nccl'); without "
            "hosts+ in the compressor, training needs no such group"
        )


def time_limit_of(group: dist.ProcessGroup, device: torch.device, otherwise: timedelta) -> timedelta:
    """Return the time limit that a group's watchdog keeps on a device; `otherwise` where torch does not show it."""
    limit = getattr(getattr(group._get_backend(device), "options", None), "_timeout", otherwise)
    assert isinstance(limit, timedelta)
    return limit


def end_when_idle(groups: Sequence[dist.ProcessGroup], device: torch.device, deadline: float) -> None:
    """End groups of a GPU once all is done that its current stream has been given, or break them off at the deadline.

    A group that is only dropped breaks off what it still sends.
    """
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    while not (idle := done.query()) and time.monotonic() < deadline:
        time.sleep(SHORTEST)
    for group in groups:
        backend = group._get_backend(device)
        names = ("shutdown", "_shutdown") if idle else ("abort", "_abort")  # the second ones before torch 2.9
        end = next((getattr(backend, name) for name in names if hasattr(backend, name)), None)
        if end is not None:
            end()


@contextmanager
def known_to_torch(group: dist.ProcessGroup, parent: dist.ProcessGroup) -> Iterator[None]:
    """Have torch's functions take a group of the ranks of `parent` inside the `with`."""
    world = c10d._world
    world.pg_map[group], world.pg_group_ranks[group] = world.pg_map[parent], world.pg_group_ranks[parent]
    try:
        yield
    finally:
        del world.pg_map[group], world.pg_group_ranks[group]


def clone_group(group: dist.ProcessGroup, limit: timedelta) -> dist.ProcessGroup:
    """Return another group of the same ranks and kind, whose collectives wait for none of the first. A collective call.

    `limit`: the time limit of its collectives.
    """
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    told, options = f"gradwire: messages of ranks {ranks}", _without_split(group, limit)
    made = dist.new_group(ranks, limit, backend, options, use_local_synchronization=True, group_desc=told)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _without_split(group: dist.ProcessGroup, limit: timedelta) -> object | None:
    """Return options by which torch's new_group splits no other group; None for kinds but NCCL, and before torch 2.15.

    A split of the default group, where a device is bound, hangs unless all ranks of it take part.
    """
    cuda = torch.device("cuda")
    if not carries(group, cuda) or backend_name(group, cuda) not in NCCL:
        return None
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "lazy_init"):
        return None
    options._timeout, options.lazy_init = limit, True
    return options


def start_sum(values: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum a tensor over ranks, in place. It does not block."""
    return group.allreduce([values])


def start_all_gather(out: Tensor, mine: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
    """Fill `out` with all ranks' tensors, one behind the other; `mine`, this rank's, may be its place in it.

    They travel as bytes, since Gloo does not know float8.
    """
    return dist.all_gather_into_tensor(out.view(torch.uint8), mine.view(torch.uint8), group=group, async_op=async_op)


def start_scatter(rows: Tensor, output: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Begin to write to a flat `output` the sum over ranks of this one's part of `rows`. It does not block."""
    return dist.reduce_scatter_tensor(output, rows, group=group, async_op=True)


def start_all_to_all(rows: Tensor, out: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Begin to fill a flat `out` with the parts of all ranks' `rows` for this one, equally long. It does not block."""
    return dist.all_to_all_single(out, rows, group=group, async_op=True)


def exist(groups: Set[dist.ProcessGroup]) -> bool:
    """Return True if none of the groups was destroyed."""
    return groups <= c10d._world.pg_map.keys()


def coalesces(group: dist.ProcessGroup) -> bool:
    """Return True inside torch's coalescing manager of a group."""
    return group in c10d._world.pg_coalesce_state


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store in which the ranks of a group, and no others, have met."""
    return c10d._world.pg_map[group][1]


def as_groups(given: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None) -> list[dist.ProcessGroup]:
    """Return the process groups given: none, one or several. Raises TypeError for anything else."""
    groups = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if not all(isinstance(group, dist.ProcessGroup) for group in groups):
        raise TypeError(
            "process_group is a torch.distributed.ProcessGroup, such as dist.new_group([0, 1]) returns, or None for the "
            f"model's own; got {given!r}"
        )
    return groups  # type: ignore[return-value]
