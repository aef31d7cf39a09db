"""Programs without a process group: all ranks in lock step in one process, or one rank on the meta device."""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kernels.dispatch import recorded_operations
from .feedback.switch import Switch
from .protocol.compressor import Compressor, children, own_traits, traits_of, unnamed
from .protocol.layout import Layout, Ranks, Scope
from .protocol.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    Program,
    ReduceScatter,
    Request,
    Scatter,
    mode,
    next_request,
)
from .state.agreed import choices
from .state.shares import placed_on_hosts
from .state.tree import Leaves

STEADY = 1 << 62  # a step after any warm-up


@dataclass(frozen=True)
class Traffic:
    """The traffic of one rank in one step.

    Attributes:
        rounds: the number of collectives, one behind the other.
        payload_bytes: bytes handed to collectives.
        sent_bytes: bytes sent to ranks of other hosts; if each rank is a host, to other ranks.
        host_bytes: bytes sent to ranks of the same host, by requests of the scope "host". They are not part of
            `sent_bytes`.
    """

    rounds: int = 0
    payload_bytes: int = 0
    sent_bytes: float = 0.0
    host_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.rounds + other.rounds,
            self.payload_bytes + other.payload_bytes,
            self.sent_bytes + other.sent_bytes,
            self.host_bytes + other.host_bytes,
        )


def traffic(request: Request, ranks: Ranks) -> Traffic:
    """The traffic of one request; a round without any keeps its place in the order of rounds."""
    if request.scope == "self":
        return Traffic(1)
    sent = request.sent_bytes(len(ranks.members(request.scope)))
    in_host = request.scope == "host"
    return Traffic(1, request.tensor.nbytes, 0.0 if in_host else sent, sent if in_host else 0.0)


def simulate(
    programs: Sequence[Program[Any]], per_host: int = 1, asked: Callable[[Request], None] | None = None
) -> list[Any]:
    """Run one program a rank to the end, in lock step; returns what each returned, in rank order.

    `asked` is told of each request of rank 0. Raises RuntimeError where ranks ask each other for different things, which
    on a real group would hang or send garbage.
    """
    ranks = [next_request(program, None) for program in programs]
    while any(request is not None for request, _ in ranks):
        requests = [request for request, _ in ranks]
        if asked is not None and requests[0] is not None:
            asked(requests[0])
        ranks = list(map(next_request, programs, _replies(requests, per_host)))
    return [result for _, result in ranks]


def _replies(requests: Sequence[Request | None], per_host: int) -> list[Tensor]:
    asked = [None if request is None else _question(request) for request in requests]
    alike = [request for request in requests if request is not None]
    if len(alike) < len(requests):
        raise RuntimeError(f"the ranks ask for different collectives: {asked}")
    replies: dict[int, Tensor] = {}
    for rank, request in enumerate(alike):
        group = Ranks(len(alike), rank, per_host).members(request.scope)
        if any(asked[member] != asked[rank] for member in group):
            raise RuntimeError(f"the ranks ask for different collectives: {asked}")
        if rank not in replies:
            replies.update(zip(group, answered(request, [alike[member].tensor for member in group]), strict=True))
    return [replies[rank] for rank in range(len(alike))]


def _question(request: Request) -> tuple[object, ...]:
    """Return what the requests of ranks that take part in one collective have in common."""
    sizes = getattr(request, "sizes", ())
    if not request.tensor.numel() and not sizes:
        raise RuntimeError("a program asked for an empty collective")
    shape = None if isinstance(request, AllGather) and sizes else request.tensor.shape
    return (type(request), mode(request), request.scope, shape, request.tensor.dtype, sizes)


def answered(request: Request, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the members' replies to requests like `request` for their tensors."""
    sizes = getattr(request, "sizes", ())
    if isinstance(request, AllToAll | ReduceScatter | Scatter) and len(sizes or request.tensor) != len(tensors):
        shape = tuple(request.tensor.shape)
        raise RuntimeError(f"{type(request).__name__} over {len(tensors)} ranks needs a row for each, got {shape}")
    match request:
        case AllReduce(op=op):
            total = _reduced(tensors, op)
            return [tensor.copy_(total) for tensor in tensors]
        case ReduceScatter(op=op):
            total = _reduced(tensors, op)
            return [part.clone() for part in (total.split(sizes) if sizes else total)]
        case AllGather():
            return [torch.cat(list(tensors)) if sizes else torch.stack(list(tensors)) for _ in tensors]
        case AllToAll():
            return [torch.stack([tensor[place] for tensor in tensors]) for place in range(len(tensors))]
        case Broadcast(source=source):
            return [tensor if tensor is tensors[source] else tensor.copy_(tensors[source]) for tensor in tensors]
        case Gather(target=target, tensor=tensor):
            none = tensor.new_empty((0, *tensor.shape))
            return [torch.stack(list(tensors)) if place == target else none for place in range(len(tensors))]
        case Scatter(source=source):
            return [row.clone() for row in tensors[source]]


def _reduced(tensors: Sequence[Tensor], op: str) -> Tensor:
    if op == "max":
        return torch.stack(list(tensors)).amax(0)
    if op == "mean":
        for tensor in tensors:
            tensor.mul_(1 / len(tensors))
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total


def dry_run(compressor: Compressor, layout: Layout, step: int = STEADY, method: int | None = None) -> Traffic:
    """Return the traffic of one step on a bucket, by running the program on the meta device: no memory, no arithmetic.

    Args:
        compressor: the compressor.
        layout: the bucket.
        step: the step, which decides the stage of a warm-up; by default all warm-ups are over.
        method: the number of the inner compressor, if the compressor chooses one of several; by default the least
            exact.

    Returns:
        The traffic of this rank.
    """
    return rehearse(compressor, dataclasses.replace(layout, device=torch.device("meta")), step, method)


def rehearse(compressor: Compressor, layout: Layout, step: int, method: int | None = None) -> Traffic:
    """The traffic of one step on a bucket of zeros, where all ranks do as this one: its kernels are compiled then."""
    ranks = placed_on_hosts(compressor, layout.ranks)
    requests = requests_of(compressor, dataclasses.replace(layout, ranks=ranks), step, method)
    return sum((traffic(each, ranks) for each in requests), Traffic())


def requests_of(compressor: Compressor, layout: Layout, step: int, method: int | None = None) -> Iterator[Request]:
    """The requests of a step on a bucket of zeros where all ranks do as this one."""
    return requests_in(_begun(compressor, layout, _zeros(layout), step, method), layout.ranks)


def requests_in(program: Program[Any], ranks: Ranks) -> Iterator[Request]:
    """Yield the requests of a program where all ranks do as this one."""
    request, _ = next_request(program, None)
    while request is not None:
        yield request
        request, _ = next_request(program, alike(request, ranks))


def _zeros(layout: Layout) -> Tensor:
    return torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)


def _begun(
    compressor: Compressor, layout: Layout, grad: Tensor, step: int, method: int | None = None
) -> Program[Tensor]:
    state = compressor.init(layout)
    Leaves(state).set_step(step)
    for choice in choices(state):
        choice.fixed = method
    return compressor.reduce(grad, state)


def steady_traffic(compressor: Compressor, layouts: Sequence[Layout]) -> Traffic:
    """The traffic of a step on all these buckets once warm-ups are over: the mean of two, as a method may alternate."""
    dry = functools.cache(partial(dry_run, compressor))
    steps = (STEADY, STEADY + 1)
    total = sum((dry(layout, step) for layout in unnamed(compressor, layouts) for step in steps), Traffic())
    return Traffic(total.rounds // 2, total.payload_bytes // 2, total.sent_bytes / 2, total.host_bytes / 2)


@dataclass(frozen=True)
class WorkMemory:
    """Bytes that a bucket takes in a step beside gradients and state.

    `waiting`: while it waits for a reply, with that. `most`: at any time, while it computes as well. `computing`: at most
    before the first request, and after each reply.
    """

    waiting: int = 0
    most: int = 0
    computing: tuple[int, ...] = ()


class TensorCount(TorchDispatchMode):
    """Bytes of the tensors that operations make inside a `with`, each memory once: now, and at most so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it makes."""
        self._note((args, kwargs), new=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, new=True)
        return result

    def _note(self, given: Any, *, new: bool) -> None:
        for storage in (each.untyped_storage() for each in tree_leaves(given) if isinstance(each, Tensor)):
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                nbytes = storage.nbytes() if new else 0
                self.now += nbytes
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._drop, storage._cdata, nbytes).atexit = False

    def _drop(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def work_memory(compressor: Compressor, layout: Layout) -> WorkMemory:
    """Return the memory of a step's payloads, replies and temporary tensors, by a dry run.

    A reduction of the gradients in their place takes none.
    """
    ranks = placed_on_hosts(compressor, layout.ranks)
    layout = dataclasses.replace(layout, ranks=ranks, device=torch.device("meta"))
    found = [memory_of(_begun(compressor, layout, _zeros(layout), step), ranks) for step in (STEADY, STEADY + 1)]
    computing = zip_longest(*(each.computing for each in found), fillvalue=0)
    return WorkMemory(max(each.waiting for each in found), max(each.most for each in found), tuple(map(max, computing)))


def memory_of(program: Program[Any], ranks: Ranks) -> WorkMemory:
    """Return the memory of the tensors that a program on the meta device makes, where all ranks do as this one."""
    waiting, computing = 0, list[int]()
    with TensorCount() as count:
        request, _ = next_request(program, None)
        while request is not None:
            computing.append(count.most)
            answer = alike(request, ranks)
            reply = answer if isinstance(request, AllReduce | Broadcast) else torch.empty_like(answer)
            del answer
            waiting, count.most = max(waiting, count.now), count.now
            del request  # its payload goes as soon as the program lets it go
            request, _ = next_request(program, reply)
    computing.append(count.most)
    return WorkMemory(waiting, max(waiting, *computing), tuple(computing))


def alike(request: Request, ranks: Ranks) -> Tensor:
    """The reply to this rank's request where all that take part ask for the same thing."""
    members = ranks.members(request.scope)
    match request:
        case AllGather(tensor=tensor, sizes=sizes):
            same = tensor.expand(len(members), *tensor.shape)  # not stacked, which goes through thousands of ranks
            return tensor.new_zeros(sum(sizes)) if sizes else same.clone(memory_format=torch.contiguous_format)
        case ReduceScatter(tensor=tensor, sizes=sizes):
            place = members.index(ranks.rank)
            return tensor.split(sizes)[place] if sizes else tensor[place]
        case Gather(tensor=tensor, target=target):
            return tensor.expand(len(members) if members.index(ranks.rank) == target else 0, *tensor.shape).clone()
        case Scatter(tensor=tensor):
            return tensor[members.index(ranks.rank)]
    return request.tensor


def boundaries(compressor: Compressor, around: frozenset[int] = frozenset({0})) -> set[int]:
    """The steps at which a compressor, or one inside it, changes stage; and of each stage one at which its ranks agree.

    `around`: the steps at which those that it is inside of do.
    """
    own = around | set(compressor.starts) if isinstance(compressor, Switch) else around
    found = set(own).union(*(boundaries(child, own) for child in children(compressor)))
    if (extra := own_traits(compressor).extra_rounds_in) is not None:
        found |= {next(filter(extra, count(step))) for step in found}
    return found


def variants(compressor: Compressor) -> Iterator[tuple[int, int]]:
    """(step, method) of everything that a step may ask for."""
    return product(boundaries(compressor), range(traits_of(compressor).choices))


def most_rounds(compressor: Compressor, layouts: Sequence[Layout]) -> int:
    """The largest number of rounds that any stage takes for any of the layouts."""
    return max(dry_run(compressor, layout, *variant).rounds for variant in variants(compressor) for layout in layouts)


def scopes_by_round(compressor: Compressor, layout: Layout) -> list[set[Scope]]:
    """Return the scopes of each round of a bucket, in any stage."""
    ranks = placed_on_hosts(compressor, layout.ranks)
    layout = dataclasses.replace(layout, device=torch.device("meta"), ranks=ranks)
    stages = [[request.scope for request in requests_of(compressor, layout, *each)] for each in variants(compressor)]
    return [{scope for scope in scopes if scope} for scopes in zip_longest(*stages)]


def operations_of(compressor: Compressor, dtype: torch.dtype, ranks: Ranks) -> set[str]:
    """The names of the kernels' operations that any step may run, on any rank of a host, for gradients of a dtype."""
    shapes, ranks = ((64, 64), (64,)), placed_on_hosts(compressor, ranks)
    with recorded_operations() as names:
        for step, method in variants(compressor):
            for each, rank in product({dtype, torch.float32}, range(ranks.per_host)):
                place = dataclasses.replace(ranks, rank=rank)
                layout = Layout(("matrix", "vector"), shapes, each, torch.device("meta"), place)
                for turn in (step, step + 1):  # a method may alternate
                    rehearse(compressor, layout, turn, method)
    return names


class Simulation:
    """A compressor on one bucket over simulated ranks, step after step, for tests and notebooks.

    Args:
        compressor: the compressor.
        layout: the bucket; its `ranks` say how many are simulated.

    Attributes:
        states: the state of each rank.
        traffic: the traffic of rank 0 in the last step.

    >>> import torch
    >>> from gradwire.compress import Ranks, compressor
    >>> layout = Layout(("weight",), ((4, 4),), torch.float32, torch.device("cpu"), Ranks(2))
    >>> simulation = Simulation(compressor("none"), layout)
    >>> simulation.step([torch.zeros(16), torch.ones(16)])[0].mean()
    tensor(0.5000)
    """

    def __init__(self, compressor: Compressor, layout: Layout) -> None:
        self.compressor = compressor
        ranks = placed_on_hosts(compressor, layout.ranks)
        places = (dataclasses.replace(ranks, rank=rank) for rank in range(ranks.world_size))
        self.layouts = [dataclasses.replace(layout, ranks=place) for place in places]
        self.states = [compressor.init(layout) for layout in self.layouts]
        self.traffic = Traffic()  # of rank 0 in the last step

    def step(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Average one step's gradients.

        Args:
            gradients: the flat gradients of each rank, which are not changed.

        Returns:
            The average that each rank gets.
        """
        for leaves in map(Leaves, self.states):  # as the engine does: a stage that waits counts no steps of its own
            leaves.set_step(max((counter.value for counter in leaves.counters), default=0))
        self.traffic, pairs = Traffic(), zip(gradients, self.states, strict=True)
        programs = [self.compressor.reduce(gradient.clone(), state) for gradient, state in pairs]
        return simulate(programs, self.layouts[0].ranks.per_host, self._note)

    def _note(self, request: Request) -> None:
        self.traffic += traffic(request, self.layouts[0].ranks)

    def copy(self) -> Simulation:
        """Return an independent simulation in the same state."""
        return copy.deepcopy(self)
