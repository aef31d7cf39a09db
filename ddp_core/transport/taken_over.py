"""Collectives of torch.distributed that gradwire takes over, before the backend of their group gets them.

torch's functions, its reducers in C++ and compiled code all reach a backend through the same few operators of torch's
dispatcher, whoever imported what. While any group is registered, kernels of ours stand in for these operators on CPUs and
GPUs. A call of another group, and one that its group's taker leaves, goes to the backend as it would without them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, _create_work_from_future

from .torch_groups import ALL_GATHER, REDUCE_SCATTER, backend_of, polled

Kind: TypeAlias = Literal["all-reduce", "reduce-scatter", "all-gather"]
DEVICES = ("CPU", "CUDA")
UNLIMITED = timedelta(0)  # torch's word for a wait without a limit of its own
BY_PYTHON = dist.distributed_c10d.__file__  # of torch's functions, whose callers hold a work in Python


@dataclass(frozen=True, eq=False)
class Collective:
    """A call of a collective on this rank.

    `given`: one tensor, or one for each rank. `written`: likewise; of an all-reduce it is `given` itself. `op`: how an
    all-reduce or a reduce-scatter reduces.
    """

    kind: Kind
    given: Sequence[Tensor]
    written: Sequence[Tensor]
    op: Any = None

    @property
    def whole(self) -> Sequence[Tensor]:
        """The tensors that have all ranks' parts."""
        return self.written if self.kind == "all-gather" else self.given

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' parts."""
        return sum(tensor.nbytes for tensor in self.whole)


Taker: TypeAlias = Callable[[Collective], "torch.futures.Future[Any] | None"]  # None: it goes to the backend
TAKERS: dict[dist.ProcessGroup, Taker] = {}
_registered: list[torch.library.Library] = []  # one while any group is registered
_lock = threading.Lock()
_latest = threading.local()  # the work that this thread has returned last


class OwnRequests(threading.local):
    """A context in which this thread's collectives are gradwire's own requests, which nobody takes over."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


OWN_REQUESTS = OwnRequests()


class TakenWork(dist.Work):
    """The work of a collective that was taken over, for callers in Python."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
        """Wait for it, on a GPU by streams. Raises RuntimeError where it fails or takes longer than `timeout`."""
        if timeout > UNLIMITED:
            polled(self, timeout.total_seconds())
        else:
            self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """One that ends with it, and has a list of what it writes."""
        return self._future

    def is_completed(self) -> bool:
        """Return True if it has ended, well or not."""
        return self._future.done()

    def is_success(self) -> bool:
        """Return True if it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error that it has ended with, if any."""
        try:
            _ = self._future.value() if self._future.done() else None
        except RuntimeError as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        """Return the tensors that it writes."""
        written: list[Tensor] = self._future.wait()
        return written


def take_over(group: dist.ProcessGroup, taker: Taker) -> None:
    """Have `taker` begin a group's collectives from now on.

    Raises ValueError where the group has a taker, and RuntimeError for a torch whose kernels cannot be stood in for.
    """
    if not hasattr(dist.ReduceOp, "unbox"):
        raise RuntimeError(
            f"compress_group cannot read how a call reduces in torch {torch.__version__}; it runs with torch 2.15. "
            "gradwire.attach for DDP and FSDP2 needs torch 2.8 alone"
        )
    with _lock:
        if group in TAKERS:
            raise ValueError(
                "this process group is compressed already: close() its handle first, or use the handle that there is"
            )
        TAKERS[group] = taker
        if not _registered:
            _registered.append(_library())


def hand_back(group: dist.ProcessGroup) -> None:
    """Have a group's collectives go to its backend again."""
    with _lock:
        TAKERS.pop(group, None)
        if not TAKERS and _registered:
            _registered.pop()._destroy()


def _library() -> torch.library.Library:
    """Put our kernels before torch's. The library's end restores these."""
    library = torch.library.Library("c10d", "IMPL")
    for name, kernel in KERNELS.items():
        for device in DEVICES:
            library.impl(name, kernel, device)
    return library


@dataclass(frozen=True)
class Call:
    """A call of an operator: `collective` for a taker, else `method` of the backend with these `tensors` and options."""

    collective: Collective | None
    method: str
    tensors: tuple[Any, Any] | tuple[Any]
    options: Any

    def begin(self, group: dist.ProcessGroup, taker: Taker | None) -> dist.Work:
        """Return the work of a taker, or of the backend."""
        future = None if taker is None or self.collective is None else taker(self.collective)
        if future is None:
            first = self.tensors[0]
            while not isinstance(first, Tensor):
                first = first[0]
            work: dist.Work = getattr(backend_of(group, first.device), self.method)(*self.tensors, self.options)
        elif sys._getframe(2).f_code.co_filename == BY_PYTHON:
            _latest.work = work = TakenWork(future)  # kept until the caller has it: nobody else holds this object
        else:
            work = _create_work_from_future(future)  # C++ holds no object of Python's; its wait() passes on no error
        return work


def _kernel(call_of: Callable[..., Call]) -> Callable[..., Any]:
    """Return what stands in for an operator, which returns what it writes and a work."""

    def kernel(written: Any, *given: Any) -> Any:
        boxed = next(place for place, each in enumerate(given) if isinstance(each, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(given[boxed])
        call = call_of(written, *given[:boxed], *given[boxed + 1 :])
        return written, call.begin(group, None if OWN_REQUESTS.depth else TAKERS.get(group)).boxed()

    return kernel


def _with(options: Any, async_op: bool, timeout: int, op: Any = None) -> Any:
    """Return a backend's options for a call. `timeout`: in milliseconds; -1 stands for the group's own."""
    options.asyncOp = async_op
    if timeout >= 0:
        options.timeout = timedelta(milliseconds=timeout)
    if op is not None:
        options.reduceOp = op
    return options


def _all_reduce(
    tensors: list[Tensor], boxed: Any, indices: Tensor | None = None, async_op: bool = True, timeout: int = -1
) -> Call:
    op, taken = dist.ReduceOp.unbox(boxed), None
    options = _with(dist.AllreduceOptions(), async_op, timeout, op)
    if indices is not None:
        options.sparseIndices = indices
    elif len(tensors) == 1:
        taken = Collective("all-reduce", tensors, tensors, op)
    return Call(taken, "allreduce", (tensors,), options)


def _reduce_scatter(
    outputs: list[Tensor], rows: list[list[Tensor]], boxed: Any, async_op: bool = True, timeout: int = -1
) -> Call:
    op = dist.ReduceOp.unbox(boxed)
    taken = Collective("reduce-scatter", rows[0], outputs, op) if len(outputs) == 1 else None
    return Call(taken, "reduce_scatter", (outputs, rows), _with(dist.ReduceScatterOptions(), async_op, timeout, op))


def _reduce_scatter_single(output: Tensor, rows: Tensor, boxed: Any, async_op: bool = True, timeout: int = -1) -> Call:
    op = dist.ReduceOp.unbox(boxed)
    options = _with(dist.ReduceScatterOptions(), async_op, timeout, op)
    return Call(Collective("reduce-scatter", [rows], [output], op), REDUCE_SCATTER, (output, rows), options)


def _all_gather(outputs: list[list[Tensor]], blocks: list[Tensor], async_op: bool = True, timeout: int = -1) -> Call:
    taken = Collective("all-gather", blocks, outputs[0]) if len(blocks) == 1 else None
    return Call(taken, "allgather", (outputs, blocks), _with(AllgatherOptions(), async_op, timeout))


def _all_gather_single(output: Tensor, block: Tensor, async_op: bool = True, timeout: int = -1) -> Call:
    taken = Collective("all-gather", [block], [output])
    return Call(taken, ALL_GATHER, (output, block), _with(AllgatherOptions(), async_op, timeout))


KERNELS = {  # without the coalesced operators, which stay torch's
    "allreduce_": _kernel(_all_reduce),
    "reduce_scatter_": _kernel(_reduce_scatter),
    "_reduce_scatter_base_": _kernel(_reduce_scatter_single),
    "allgather_": _kernel(_all_gather),
    "_allgather_base_": _kernel(_all_gather_single),
}
