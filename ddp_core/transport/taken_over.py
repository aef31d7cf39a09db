"""Collectives of torch.distributed that gradwire takes over, before the backend of their group gets them.

torch's functions, its reducers in C++ and compiled code all reach a backend through the same few operators of torch's
dispatcher, whoever imported what. From the first `take_over` until a `hand_back` leaves no group, kernels of ours stand in
for these operators on CPUs and GPUs. A call of another group, and one that its group's taker leaves, goes to the backend as
it would without them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .torch_groups import coalesces, exist, polled

Kind: TypeAlias = Literal["all-reduce", "reduce-scatter", "all-gather"]
OF_BACKENDS = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
UNLIMITED = timedelta(0)  # torch's word for a wait without a limit of its own
BY_PYTHON = dist.distributed_c10d.__file__  # of torch's functions, whose callers hold a work in Python
FROM_CALLBACK = "Got the following error when running the callback: RuntimeError: "  # torch's words


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


@dataclass(frozen=True, eq=False)
class Taker:
    """The taker of a group's collectives.

    `least`: the bytes of all ranks' parts from which it is asked. `begin`: begins a call; None leaves it to the backend.
    `end`: called once the group was destroyed.
    """

    least: int
    begin: Callable[[Collective], torch.futures.Future[Any] | None]
    end: Callable[[], None]


TAKERS: dict[dist.ProcessGroup, Taker] = {}
_registered: list[torch.library.Library] = []  # one while any group is registered
_lock = threading.Lock()
_latest = threading.local()  # keeps the work that this thread has returned last


class OwnRequests(threading.local):
    """A context in which this thread's collectives are gradwire's own requests, which nobody takes over."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


OWN_REQUESTS = OwnRequests()


class TakenWork(dist.Work):
    """The work of a collective that was taken over."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future
        self._kept: list[TakenWork] = [
            self
        ]  # until the caller has it: of a work in Python, torch alone keeps no object
        _latest.kept = self._kept

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
        """Wait for it, on a GPU by streams. Raises RuntimeError where it fails or takes longer than `timeout`."""
        self._kept.clear()
        if timeout > UNLIMITED:
            polled(self, timeout.total_seconds())
        elif error := self._waited():
            raise error
        return True

    def _waited(self) -> RuntimeError | None:
        try:
            self._future.wait()
        except RuntimeError as error:
            return RuntimeError(str(error).removeprefix(FROM_CALLBACK).partition("\n\nAt:\n")[0])
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        """One that ends with it, and has a list of what it writes."""
        self._kept.clear()
        return self._future

    def is_completed(self) -> bool:
        """Return True if it has ended, well or not."""
        return self._future.done()

    def is_success(self) -> bool:
        """Return True if it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error that it has ended with, if any."""
        return self._waited() if self._future.done() else None

    def result(self) -> list[Tensor]:
        """Return the tensors that it writes."""
        self.wait()
        written: list[Tensor] = self._future.value()
        return written


class Keeper(dist.ProcessGroup):
    """Hands works in Python to C++, which keeps their objects: torch wraps what a group in Python returns."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def barrier(self, *_: Any, **__: Any) -> dist.Work:
        """Return the work that this thread has made last."""
        work: dist.Work = _latest.kept.pop()
        return work


KEEPER = Keeper()


def take_over(group: dist.ProcessGroup, taker: Taker) -> None:
    """Have `taker` begin a group's collectives from now on.

    Raises ValueError where the group has a taker.
    """
    drop_destroyed()
    with _lock:
        if group in TAKERS:
            raise ValueError(
                "this process group is compressed already: close() its handle first, or use the handle that there is"
            )
        if not _registered:
            _registered.append(_library())
        TAKERS[group] = taker


def hand_back(group: dist.ProcessGroup) -> None:
    """Have a group's collectives go to its backend again."""
    with _lock:
        TAKERS.pop(group, None)
        if not TAKERS and _registered:
            _registered.pop()._destroy()


def drop_destroyed() -> None:
    """End the takers of groups that were destroyed."""
    for group in [each for each in list(TAKERS) if not exist({each})]:
        if (taker := TAKERS.pop(group, None)) is not None:
            taker.end()


def _library() -> torch.library.Library:
    """Put our kernels before torch's, at a key that all tensors pass, until the library ends."""
    library = torch.library.Library("c10d", "IMPL")
    for name, operator in OPERATORS.items():
        library.impl(name, operator.kernel(getattr(torch.ops.c10d, name).default), "BackendSelect", with_keyset=True)
    return library


@dataclass(frozen=True)
class Operator:
    """An operator of c10d.

    `group`, `whole`, `op`: the positions of the group, of the tensors with all ranks' parts and of the reduction among its
    arguments; gathers have no `op`. `collective`: makes a Collective of the arguments, or None of calls that are left.
    """

    group: int
    whole: int
    op: int | None
    collective: Callable[..., Collective | None]

    def kernel(self, torchs: Any) -> Callable[..., Any]:
        """Return what comes before torch's kernel. It decides before it builds anything: small calls are many."""

        def kernel(keys: torch.DispatchKeySet, *given: Any) -> Any:
            group = dist.ProcessGroup.unbox(given[self.group])
            if not exist(TAKERS.keys()):
                drop_destroyed()
            taker = TAKERS.get(group)
            if taker is None or OWN_REQUESTS.depth or nbytes(given[self.whole]) < taker.least or coalesces(group):
                return torchs.redispatch(keys & OF_BACKENDS, *given)
            caller = sys._getframe().f_back  # a thread of C++ has no frame
            by_python = caller is not None and caller.f_code.co_filename == BY_PYTHON
            op = None if self.op is None else reduction(given[self.op], caller if by_python else None)
            collective = self.collective(op, *given)
            future = None if collective is None else taker.begin(collective)
            if future is None:
                return torchs.redispatch(keys & OF_BACKENDS, *given)
            work = TakenWork(future)
            return given[0], (work if by_python else dist.ProcessGroup.barrier(KEEPER, dist.BarrierOptions())).boxed()

        return kernel


def reduction(boxed: Any, caller: FrameType | None) -> Any:
    """Return how a call reduces; None if unknown.

    Before torch 2.15 an operator cannot open its argument. torch's functions in Python, as the `caller`, have it in a
    local variable `op`; calls from C++ remain unknown.
    """
    if hasattr(dist.ReduceOp, "unbox"):
        return dist.ReduceOp.unbox(boxed)
    op = None if caller is None else caller.f_locals.get("op")
    return dist.ReduceOp(op) if isinstance(op, dist.ReduceOp.RedOpType) else op


def nbytes(tensors: Any) -> int:
    """Return the bytes of a tensor, or of equal ones in lists; 0 for sparse ones, which torch does not count."""
    count = 1
    while not isinstance(tensors, Tensor):
        if not tensors:
            return 0
        count, tensors = count * len(tensors), tensors[0]
    return 0 if tensors.is_sparse else count * tensors.nbytes


def _all_reduce(op: Any, tensors: list[Tensor], _: Any, __: Any, indices: Any = None, *___: Any) -> Collective | None:
    if indices is not None or len(tensors) != 1:
        return None
    return Collective("all-reduce", tensors, tensors, op)


def _reduce_scatter(op: Any, outputs: list[Tensor], rows: list[list[Tensor]], *_: Any) -> Collective | None:
    return Collective("reduce-scatter", rows[0], outputs, op) if len(outputs) == 1 else None


def _reduce_scatter_single(op: Any, output: Tensor, rows: Tensor, *_: Any) -> Collective:
    return Collective("reduce-scatter", [rows], [output], op)


def _all_gather(_: None, outputs: list[list[Tensor]], blocks: list[Tensor], *__: Any) -> Collective | None:
    return Collective("all-gather", blocks, outputs[0]) if len(blocks) == 1 else None


def _all_gather_single(_: None, output: Tensor, block: Tensor, *__: Any) -> Collective:
    return Collective("all-gather", [block], [output])


OPERATORS = {  # without the coalesced ones, which stay torch's
    "allreduce_": Operator(1, 0, 2, _all_reduce),
    "reduce_scatter_": Operator(2, 1, 3, _reduce_scatter),
    "_reduce_scatter_base_": Operator(2, 1, 3, _reduce_scatter_single),
    "allgather_": Operator(2, 0, None, _all_gather),
    "_allgather_base_": Operator(2, 0, None, _all_gather_single),
}
