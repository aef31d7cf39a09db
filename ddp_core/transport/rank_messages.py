"""The messages of ranks outside of a step: texts, values, the tensors of one rank. All calls are collective, and block.

They are messages of a transport: see `Transport.message`.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ...compress.protocol.requests import AllGather, AllReduce, Broadcast, Gather, Request, Scatter
from .lost_ranks import explained
from .protocol import Transport

MESSAGE_BYTES = 250 * 1024 * 1024  # of one broadcast of many tensors
MEASUREMENTS, FINITE = "their measurements", "which gradients are finite"
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@contextmanager
def telling(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Have an error in the body say what ranks were telling each other."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"the ranks could not exchange {what}: one has died, hangs, or raised an error. {explained(error, group)}"
        ) from error


def ask(request: Request, transport: Transport, *, what: str = MEASUREMENTS) -> Tensor:
    """Return the reply to a message, within the transport's limit. `what`: the message has, for errors."""
    with telling(what, transport.group):
        return transport.message(request).wait(transport.limit)


def true_everywhere(flag: Tensor, transport: Transport, *, what: str) -> Tensor:
    """Return a flag, on the device of this rank's, that is True if those of all ranks are."""
    untrue = ask(AllReduce((flag == 0).float().view(1), "max"), transport, what=what)
    return (untrue == 0).all()


def exchange(text: str, transport: Transport, *, what: str = MEASUREMENTS) -> list[str]:
    """Return every rank's text, in rank order."""
    return [message.decode() for message in exchange_bytes(text.encode(), transport, what=what)]


def exchange_bytes(message: bytes, transport: Transport, *, what: str = MEASUREMENTS) -> list[bytes]:
    """Return every rank's message, in rank order."""
    sizes = _sizes(message, transport, what)
    rows = ask(AllGather(_row(message, max(1, *sizes))), transport, what=what).cpu()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def gathered(value: Any, transport: Transport, *, what: str) -> list[Any]:
    """Return the values of all ranks on rank 0, in rank order; on the others an empty list."""
    message = pickle.dumps(value)
    sizes = _sizes(message, transport, what)
    rows = ask(Gather(_row(message, max(sizes))), transport, what=what).cpu()
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=False)]


def scattered(values: Sequence[Any], transport: Transport, *, what: str) -> Any:
    """Return this rank's one of the values that rank 0 gives, in rank order; those of others do not count."""
    ranks = transport.ranks
    messages = [pickle.dumps(value) for value in values] if ranks.rank == 0 else [b""] * ranks.world_size
    sizes = ask(Broadcast(torch.tensor([len(message) for message in messages])), transport, what=what).tolist()
    rows = [_row(message, max(sizes)) for message in messages] if ranks.rank == 0 else [_row(b"", max(sizes))]
    request = Scatter(torch.stack(rows).expand(ranks.world_size, -1))
    return pickle.loads(ask(request, transport, what=what).cpu()[: sizes[ranks.rank]].numpy().tobytes())


def _sizes(message: bytes, transport: Transport, what: str) -> list[int]:
    """Return the bytes of every rank's message."""
    sizes: list[int] = ask(AllGather(torch.tensor([len(message)])), transport, what=what).flatten().tolist()
    return sizes


def _row(message: bytes, size: int) -> Tensor:
    """Return the bytes of a message, with zeros behind them up to `size`."""
    return torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)


def broadcast(tensors: Sequence[Tensor], source: int, transport: Transport, *, what: str) -> None:
    """Copy tensors from rank `source` to all ranks, as bytes, many in one message. `what`: they are, for errors."""
    by_type = sorted(tensors, key=_type)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        for part in _messages([tensor for tensor in by_type if tensor.device == device]):
            alike = [list(group) for _, group in groupby(part, _type)]
            flats = [_flatten_dense_tensors(group).view(torch.uint8) for group in alike]
            message = torch.cat(flats) if len(flats) > 1 else flats[0]
            message = ask(Broadcast(message, source), transport, what=what)
            if transport.ranks.rank != source:
                for group, flat in zip(alike, message.split([flat.numel() for flat in flats]), strict=True):
                    torch._foreach_copy_(group, _unflatten_dense_tensors(flat.view(group[0].dtype), group))


def _type(tensor: Tensor) -> tuple[int, str]:
    """Return a key by which each type lies where it may begin, behind larger ones."""
    return -tensor.element_size(), str(tensor.dtype)


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors of each message."""
    part, size = list[Tensor](), 0
    for tensor in tensors:
        if part and size + tensor.nbytes > MESSAGE_BYTES:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.nbytes
    yield part


def largest(value: int, transport: Transport) -> int:
    """Return the largest of all ranks' values."""
    return int(ask(AllReduce(torch.tensor([value]), "max"), transport, what="whether they have inputs left"))


def checksum(tensors: Sequence[Tensor]) -> str:
    """A digest of the tensors' bits, the same whatever the order in which a device adds them up."""
    if not tensors:
        return "nothing"
    return digest(list(map(bit_sum, tensors)))


def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's numbers as integers of their size, on its device."""
    flat = tensor.detach()
    real = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    return real.reshape(-1).contiguous().view(INTEGERS[real.element_size()]).sum(dtype=torch.int64)


def digest(sums: Sequence[Tensor]) -> str:
    """A digest of sums of `bit_sum`."""
    return hashlib.sha256(str(torch.stack(list(sums)).tolist()).encode()).hexdigest()[:12]


def unlike(named: Mapping[str, Tensor], transport: Transport) -> str | None:
    """Return how tensors differ between ranks, by their names and for an error; None where all have the same bits."""
    sums = {name: bit_sum(named[name]) for name in sorted(named)}
    mine = torch.stack(list(sums.values())).tolist() if sums else []
    what = "their parameters"
    digests = exchange(hashlib.sha256(str([list(sums), mine]).encode()).hexdigest(), transport, what=what)
    ranks = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if not ranks:
        return None
    told = exchange(json.dumps(list(zip(sums, mine, strict=True))), transport, what=what)
    found = [{(name, value) for name, value in json.loads(text)} for text in told]
    names = sorted({name for rank in ranks for name, _ in found[0] ^ found[rank]})
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"the parameters of ranks {ranks} differ from those of rank 0: {shown}. Load one rank's checkpoint on all of them, "
        "and take every decision that changes parameters on all ranks alike"
    )
