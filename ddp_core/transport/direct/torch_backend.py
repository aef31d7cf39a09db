"""A backend of torch.distributed: what is large and faster so goes direct, all else is Gloo's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from .collectives import GLOO, PINNED, Collectives, Direct

NAME = "gradwire"
LEAST_TORCH = (2, 14)  # from which on a backend can be written in Python
# Bytes of all ranks' blocks from which on each kind goes direct: docs/benchmarks/collectives.md has the measurements. Gloo's
# reduce-scatter is an all-reduce, which takes twice as long at all sizes; its others have ended before a thread wakes.
SMALLEST_BYTES = {"reduce_scatter": 2**16, "all_gather": 2**20, "all_to_all": 2**20}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SUMMED = (*FLOATS, torch.int32, torch.int64, torch.int8, torch.uint8)
HANDED_ON = (  # to Gloo
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "allreduce_sparse",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
)


def register() -> None:
    """Make `init_process_group("gradwire")` known to torch. RuntimeError where torch is too old for it."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < LEAST_TORCH:
        raise RuntimeError(
            f"the backend gradwire needs torch {'.'.join(map(str, LEAST_TORCH))} or later, and this is {torch.__version__}: "
            "upgrade torch, or use init_process_group('gloo')"
        )
    dist.Backend.register_backend(NAME, DirectBackend.of, extended_api=True, devices=["cpu"])


class DirectBackend(Backend):
    """The backend that torch calls; see `dist.Backend`. Groups of one rank are Gloo's alone."""

    options: Any = None  # torch's own property calls itself without end, which Python 3.13 does not survive

    @classmethod
    def of(cls, options: Any, _: Any = None) -> DirectBackend:
        """For torch's `_DistributedBackendOptions`."""
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            raise RuntimeError(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends in a way that one written in Python does not take: use INFO, "
                "or init_process_group('gloo') while you debug"
            )
        return cls(options.store, options.group_rank, options.group_size, options.timeout)

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._ranks = size
        self._gloo: Any = dist.ProcessGroupGloo(  # torch's types do not list what it can do
            dist.PrefixStore("gloo/", store), rank, size, timeout
        )
        self._direct = Collectives(store, rank, size, timeout)

    def getBackendName(self) -> str:
        """Its name."""
        return NAME

    def allgather(self, outputs: Sequence[Sequence[Tensor]], blocks: Sequence[Tensor], options: Any) -> dist.Work:
        """One tensor of each rank, to a list of tensors."""
        if len(blocks) == 1 and self._goes_direct("all_gather", blocks[0], outputs[0]):
            return Direct(self._direct.all_gather(outputs[0], blocks[0]), outputs[0])
        return self._by_gloo("allgather", outputs, blocks, options)

    def all_gather_single(self, output: Tensor, block: Tensor, options: Any) -> dist.Work:
        """One tensor of each rank, to one tensor."""
        if self._goes_direct("all_gather", block, [output]):
            return Direct(self._direct.all_gather(self._rows(output), block), [output])
        return self._by_gloo("all_gather_single", output, block, options)

    def all_to_all_single(
        self, output: Tensor, rows: Tensor, output_sizes: Sequence[int], row_sizes: Sequence[int], options: Any
    ) -> dist.Work:
        """A row for each rank, for one from each rank."""
        even = not (output_sizes or row_sizes) and output.shape == rows.shape and len(rows) % self._ranks == 0
        plain = even and _is_plain(output) and output.dtype == rows.dtype
        if plain and self._goes_direct("all_to_all", None, [rows]):
            return Direct(self._direct.all_to_all(self._rows(output), self._rows(rows)), [output])
        return self._by_gloo("all_to_all_single", output, rows, output_sizes, row_sizes, options)

    def reduce_scatter(self, outputs: Sequence[Tensor], rows: Sequence[Sequence[Tensor]], options: Any) -> dist.Work:
        """Sums of one tensor for each rank, from a list of tensors."""
        if len(outputs) == 1 and self._sums_direct(outputs[0], rows[0], options):
            return Direct(self._direct.reduce_scatter(outputs[0], rows[0]), outputs)
        return self._by_gloo("reduce_scatter", outputs, rows, options)

    def reduce_scatter_single(self, output: Tensor, rows: Tensor, options: Any) -> dist.Work:
        """Sums of one tensor for each rank, from one tensor."""
        if self._sums_direct(output, [rows], options):
            return Direct(self._direct.reduce_scatter(output, self._rows(rows)), [output])
        return self._by_gloo("reduce_scatter_single", output, rows, options)

    def _by_gloo(self, name: str, *arguments: Any) -> dist.Work:
        work: dist.Work = getattr(self._gloo, name)(*arguments)
        return work

    def _rows(self, tensor: Tensor) -> Sequence[Tensor]:
        """A contiguous tensor's parts for each rank."""
        return tensor.view(-1).view(self._ranks, -1).unbind()

    def _goes_direct(self, kind: str, block: Tensor | None, whole: Sequence[Tensor]) -> bool:
        """Return True if a collective is direct, of the data of all ranks, `whole`, and a rank's block of it."""
        tensors, numel = [*([] if block is None else [block]), *whole], sum(each.numel() for each in whole)
        size = numel * whole[0].element_size() if whole else 0
        small = size < SMALLEST_BYTES[kind] or (block is not None and numel != self._ranks * block.numel())
        if self._ranks == 1 or small or os.environ.get(PINNED) == GLOO:
            return False
        plain = all(_is_plain(each) and each.dtype == whole[0].dtype for each in tensors)
        return plain and kind in self._direct.kinds()

    def _sums_direct(self, output: Tensor, rows: Sequence[Tensor], options: Any) -> bool:
        """Return True if a reduce-scatter is direct; not if its output lies among its rows, which may be on their way."""
        memory = output.untyped_storage().data_ptr()
        apart = all(row.untyped_storage().data_ptr() != memory for row in rows)
        summed = options.reduceOp == dist.ReduceOp.SUM and output.dtype in SUMMED
        return apart and summed and self._goes_direct("reduce_scatter", output, rows)

    @property
    def limit(self) -> timedelta:
        """The time limit of its collectives."""
        return self._direct.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of all that begins from now on."""
        self._gloo.set_timeout(timeout)
        self._direct.timeout = timeout

    def shutdown(self) -> None:
        """End what has begun, and close the connections."""
        self._direct.close()
        self._gloo.shutdown()

    def abort(self) -> None:
        """Close the connections, as `shutdown` does."""
        self._direct.close()
        self._gloo.abort()


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _handed_on(name: str) -> Callable[..., Any]:
    def collective(self: DirectBackend, *arguments: Any) -> Any:
        return getattr(self._gloo, name)(*arguments)

    collective.__name__ = name
    collective.__doc__ = f"Gloo's {name}."
    return collective


for _name in HANDED_ON:
    setattr(DirectBackend, _name, _handed_on(_name))
