"""`gradwire.compress_group`: compression of the collectives that a training loop calls on a process group by itself."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress import Codec, Ranks
from ...compress import compressor as compressor_of
from ...compress.algorithms.half import SixteenBits
from ...compress.protocol.requests import Program
from ...compress.shards.codec import codec_of
from ...compress.simulate import operations_of
from ...ddp_core.averaging.same_kernels import agree_on_kernels
from ...ddp_core.engine.engine import DEVICES, Engine
from ...ddp_core.engine.lanes import FuturePending, ProgramError, Task
from ...ddp_core.transport.lost_ranks import await_all, meet, place
from ...ddp_core.transport.process_group import ProcessGroup, over
from ...ddp_core.transport.rank_messages import exchange
from ...ddp_core.transport.same_setup import agree
from ...ddp_core.transport.taken_over import Collective, Taker, hand_back, take_over
from .programs import all_reduced, averaging, gathered, reduce_scattered

logger = logging.getLogger(__name__)
ALLOWED = ("int8", "bf16", "int4")
FROM = 10**6  # bytes
ROUNDS = 2
AT_EXIT = timedelta(seconds=5)
SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HERE, REMEDY = (
    "have called compress_group",
    "call it on all ranks of the group; a rank may also be late, or have failed",
)


@dataclass(frozen=True)
class CollectiveStats:
    """The cost of a group's compressed collectives on this rank.

    Attributes:
        calls: the number of compressed calls.
        bytes_before: the bytes that this rank would have sent for them in rings.
        bytes_sent: the bytes that it sent.
        seconds: from each call to its result, added up; on GPUs the host's part alone.
    """

    calls: int = 0
    bytes_before: float = 0.0
    bytes_sent: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class CallFilter:
    """The choice of the collectives that are compressed.

    Sizes and types alone decide, and before torch 2.15 whether Python or C++ calls: so all ranks call alike.
    """

    compressor: str
    min_bytes: int
    gather: str | None

    def __post_init__(self) -> None:
        if not isinstance(self.min_bytes, int) or self.min_bytes < 1:
            raise ValueError(f"min_bytes is a whole number of bytes, at least 1; got {self.min_bytes!r}")
        if self.gather not in (None, "bf16"):
            raise ValueError(f"gather is None (all-gathers stay as they are) or 'bf16'; got {self.gather!r}")

    def __str__(self) -> str:
        size = f"{self.min_bytes / 10**6:g} MB"
        gathers = "" if self.gather is None else f", all-gathers of float32: {self.gather}"
        return f"compresses all-reduces and reduce-scatters from {size}: {self.compressor}{gathers}"

    def takes(self, call: Collective, codec: Codec, ranks: int) -> bool:
        """Return True if a call is compressed. Calls whose sizes do not fit together are left for torch to refuse."""
        dtype, whole = call.given[0].dtype, call.whole
        part = call.given[0] if call.kind == "all-gather" else call.written[0]
        parts = 1 if call.kind == "all-reduce" else ranks
        fits = {(each.dtype, each.numel()) for each in whole} == {(dtype, part.numel() * parts // len(whole))}
        here = call.given[0].device.type in DEVICES and call.nbytes >= self.min_bytes
        if not here or part.dtype != dtype or len(whole) not in (1, parts) or not fits:
            return False
        if call.kind == "all-gather":
            return self.gather is not None and dtype == torch.float32
        narrow = isinstance(codec, SixteenBits) and dtype != torch.float32  # it would save nothing
        return any(call.op == op for op in SUMS) and dtype in FLOATS and not narrow


class GroupHandle:
    """The compression of a group's collectives on this rank, made by `gradwire.compress_group`.

    All ranks of the group call `off` and `close` between the same two collectives.
    """

    def __init__(self, group: dist.ProcessGroup, choice: CallFilter) -> None:
        self._group, self._choice, self._codec = group, choice, codec_for(choice.compressor)
        self._ranks, messages = Ranks(group.size(), group.rank()), over(group)
        self._limit = messages.limit
        self._engines: dict[torch.device, Engine] = {}
        self._lock, self._stats, self._paused = threading.Lock(), CollectiveStats(), 0
        await_all(group, HERE, REMEDY, self._limit)
        agree(repr(choice), messages, what="the arguments of compress_group", way_out="; pass the same on all ranks")
        meet(group, exchange(place(), messages, what="where they run"))
        take_over(group, Taker(choice.min_bytes, self._begin, self._end))
        if self._ranks.rank == 0:
            logger.warning("gradwire %s", choice)

    def stats(self) -> CollectiveStats:
        """Return what the compressed calls that have ended have cost.

        Returns:
            Counts, bytes and seconds since `compress_group`.
        """
        return self._stats

    @contextmanager
    def off(self) -> Iterator[None]:
        """Leave the group's collectives uncompressed inside the `with`, on all ranks: for sums that are no gradients."""
        self._pause(1)
        try:
            yield
        finally:
            self._pause(-1)

    def _pause(self, more: int) -> None:
        with self._lock:
            self._paused += more

    def close(self) -> None:
        """Compress no more. What is under way comes to its end first."""
        hand_back(self._group)
        self._end(None)

    def _end(self, limit: timedelta | None = AT_EXIT) -> None:
        for engine in self._engines.values():
            engine.close(limit)

    def _begin(self, call: Collective) -> torch.futures.Future[Any] | None:
        """Begin a call that is compressed; None for others, which go to the backend."""
        if (
            self._paused
            or self._ranks.world_size == 1
            or not self._choice.takes(call, self._codec, self._ranks.world_size)
        ):
            return None
        label = f"the {call.kind} of {call.nbytes} bytes"
        task = Task(self._program(call), label, needs_future=True, nbytes=call.nbytes)
        began = time.perf_counter()
        engine = self._engine(call.given[0].device)
        pending = engine.submit(task)
        engine.send_all()
        assert isinstance(pending, FuturePending)
        return pending.future.then(partial(self._ended, call, task, began))

    def _program(self, call: Collective) -> Program[Tensor]:
        if call.kind == "all-gather":
            return gathered(call.given[0], call.written, torch.bfloat16)
        factor = call.op.__getstate__()[1]  # of PREMUL_SUM; None for other operations
        times = 1.0 if call.op == dist.ReduceOp.AVG else float(self._ranks.world_size)
        reduction = self._codec, self._ranks, factor, times
        if call.kind == "all-reduce":
            return all_reduced(call.given[0], *reduction)
        return reduce_scattered(call.given, call.written[0], *reduction)

    def _ended(
        self, call: Collective, task: Task, began: float, done: torch.futures.Future[Tensor]
    ) -> Sequence[Tensor]:
        """Count a call, and return what torch's own future has. A future passes on what is raised here, as an error."""
        try:
            done.value()
        except ProgramError as error:
            raise RuntimeError(error.args[0]) from None  # its own text is for DDP's hooks
        rounds = 2 if call.kind == "all-reduce" else 1  # of a ring
        others = rounds * (self._ranks.world_size - 1) / self._ranks.world_size
        with self._lock:
            now = self._stats
            self._stats = replace(
                now,
                calls=now.calls + 1,
                bytes_before=now.bytes_before + others * call.nbytes,
                bytes_sent=now.bytes_sent + sum(sent for _, _, sent in task.record.requests),
                seconds=now.seconds + time.perf_counter() - began,
            )
        return list(call.written)

    def _engine(self, device: torch.device) -> Engine:
        """Return the engine of a device. Making it is a collective call, at the first compressed one."""
        with self._lock:
            if device not in self._engines:
                transport = ProcessGroup(self._group, device, self._limit)
                engine = Engine(transport, device, self._limit)
                engine.prepare(ROUNDS)
                operations = operations_of(averaging(self._codec), torch.float32, self._ranks)
                agree_on_kernels(operations, transport, device)
                weakref.finalize(self, engine.close, AT_EXIT)  # a thread inside torch would abort the interpreter
                self._engines[device] = engine
            return self._engines[device]


def codec_for(compressor: str) -> Codec:
    """Return the codec of a compressor that needs no memory between calls. Raises ValueError for others."""
    method, _, options = str(compressor).partition(":")
    if method not in ALLOWED or "error_feedback" in options or "core" in options:
        raise ValueError(
            f"compress_group takes {', '.join(ALLOWED)}, with options such as int8:block=64; got {compressor!r}. "
            "A collective has no name under which a residual or a core could wait for the next step. So error feedback and "
            "core= need a hook: gradwire.attach for DDP"
        )
    codec = codec_of(compressor_of(compressor), compressor)[0]
    assert codec is not None
    return codec


def compress_group(
    group: dist.ProcessGroup | None = None,
    compressor: str = "int8",
    *,
    min_bytes: int = FROM,
    gather: str | None = None,
) -> GroupHandle:
    """Compress the all-reduces and reduce-scatters that a training loop calls on a process group. A collective call.

    SUM, AVG and PREMUL_SUM of float32, bfloat16 and float16 are compressed. Smaller tensors, integers, float64, MIN, MAX
    and all other collectives stay as they are, bit for bit. No memory is kept between calls.

    Args:
        group: the process group; None for the default group.
        compressor: "int8", "bf16" (float32 is sent in 16 bits and summed in 32) or "int4".
        min_bytes: the size from which tensors are compressed. It counts all ranks' parts of a reduce-scatter.
        gather: "bf16" gathers float32 in 16 bits; the rank whose part it is gets it rounded, too. None: not compressed.

    Returns:
        The handle: `stats()`, `off()` and `close()`.

    Raises:
        TypeError: `group` is no process group of this rank.
        ValueError: another compressor, ranks whose arguments differ, or a group that is compressed already.
        RuntimeError: there is no process group, or some ranks do not call it.
    """
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError("there is no process group yet: call torch.distributed.init_process_group() first")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is a torch.distributed.ProcessGroup of which this rank is a member, or None; got {group!r}"
        )
    return GroupHandle(group, CallFilter(compressor, min_bytes, gather))
