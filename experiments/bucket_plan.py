"""The traffic and memory of a step with compressors, before anything is trained, under DDP: `gradwire.plan`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, nn

from ..compress import Compressor, Layout, Ranks, Spec, Traffic
from ..compress import compressor as compressor_of
from ..compress.builder.spelling import nearest_named, whole_number
from ..compress.protocol.compressor import unnamed
from ..compress.simulate import steady_traffic, work_memory
from ..compress.state.shares import placed_on_hosts, ranks_given
from ..ddp_core import assigned, caps_in_bytes, layout_of
from ..ddp_core.engine.in_flight import in_flight
from ..ddp_core.memory.out_of_memory import kept_bytes

META = torch.device("meta")


@dataclass(frozen=True)
class Plan:
    """The traffic of one rank in a synchronized step, after warm-up; for alternating compressors the mean of two steps.

    Attributes:
        compressor: the compressor, as it was given.
        parameters: the number of elements of the model's parameters that train.
        world_size: the number of ranks.
        payload_bytes_per_step: bytes that the rank hands to collectives.
        sent_bytes_per_step: bytes that leave the rank, in ring all-reduces and direct all-gathers and all-to-alls.
        compression_ratio: bytes of an uncompressed ring all-reduce of the gradients over `sent_bytes_per_step`; with
            `hosts+` in two levels, too; of payloads if there is one rank only.
        state_bytes: memory that stays on the rank between steps, without the copy of `undo=True`.
        work_bytes: the most memory that a step takes in addition, on the CPU: payloads and replies of buckets on their
            way, and temporary tensors. torch's own DDP takes about 2 bytes per parameter more than its gradients.
    """

    compressor: str
    parameters: int
    world_size: int
    payload_bytes_per_step: int
    sent_bytes_per_step: float
    compression_ratio: float
    state_bytes: int = 0
    work_bytes: int = 0

    @classmethod
    def of(
        cls, name: str, elements: int, world_size: int, now: Traffic, before: Traffic, state_bytes: int, work_bytes: int
    ) -> Plan:
        """Return the plan of a step with the traffic `now`, which without compressors would be `before`."""
        sent = _ratio(before, now, world_size)
        return cls(name, elements, world_size, now.payload_bytes, now.sent_bytes, sent, state_bytes, work_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most memory that compression takes on the rank: state and work."""
        return self.state_bytes + self.work_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """`peak_bytes` divided by `parameters`."""
        return self.peak_bytes / self.parameters


@nearest_named
def plan(
    model: nn.Module,
    compressor: Spec,
    *,
    world_size: int,
    bucket_mb: float | None = None,
    order: Sequence[Tensor] | None = None,
    ranks_per_host: int = 1,
) -> Plan:
    """Compute the traffic of a model with a compressor on `world_size` ranks, by a dry run that allocates nothing.

    Args:
        model: the model; it may be on the meta device.
        compressor: the compressor. See `gradwire.compressor`.
        world_size: the number of ranks.
        bucket_mb: DDP's bucket size in MiB; None means its default, 1 for the first bucket and 25 for the rest.
        order: the parameters in the order in which their gradients get ready, which decides DDP's buckets; by default
            the reverse of their definition.
        ranks_per_host: the number of ranks on each host, for `hosts+` compressors.

    Returns:
        The traffic and memory of one rank.

    Raises:
        ValueError: the compressor is unknown, `world_size` is no whole number, or the model has no parameters to
            train.

    >>> import torch
    >>> with torch.device("meta"):
    ...     network = torch.nn.Linear(1000, 1000, bias=False)
    >>> plan(network, "powersgd:rank=1", world_size=4).compression_ratio
    500.0
    """
    world_size = whole_number(world_size, "world_size is a whole number, at least 1")
    built = compressor_of(compressor)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    if not names:
        raise ValueError(f"{type(model).__name__} has no parameters that require gradients: there is nothing to plan")
    parameters = list(names)
    ready = parameters[::-1] if order is None else list(order)
    ranks = Ranks(world_size, 0, ranks_per_host)
    layouts = bucket_layouts({names[parameter]: parameter for parameter in ready}, bucket_mb, ranks)
    now = steady_traffic(built, layouts)
    two_levels = 1 if ranks_given(built) is None else placed_on_hosts(built, ranks).per_host
    before = _uncompressed(sum(layout.numel * layout.dtype.itemsize for layout in layouts), world_size, two_levels)
    elements = sum(p.numel() for p in parameters)
    name = compressor if isinstance(compressor, str) else repr(built)
    state, work = state_bytes(built, layouts), work_bytes(built, layouts)
    return Plan.of(name, elements, world_size, now, before, state, work)


def state_bytes(built: Compressor, layouts: Sequence[Layout]) -> int:
    """Return the bytes that a rank keeps between steps. What ranks share has a second copy, residuals have none."""
    kept = functools.cache(partial(kept_bytes, built))
    return sum(map(kept, unnamed(built, layouts)))


def work_bytes(built: Compressor, layouts: Sequence[Layout]) -> int:
    """Return the most bytes beside gradients and state: of buckets that wait for replies, some of which are computed.

    Each round has a thread of its own, so that as many buckets are computed as are on their way.
    """
    most, gradients = 0, [layout.numel * layout.dtype.itemsize for layout in layouts]
    each = list(map(functools.cache(partial(work_memory, built)), unnamed(built, layouts)))
    for first in range(len(layouts)):
        together = each[first : first + in_flight(gradients[first:])]
        beyond = [[peak - bucket.waiting for peak in bucket.computing] for bucket in together]
        rounds = sorted((max(0, *of_round) for of_round in zip_longest(*beyond, fillvalue=0)), reverse=True)
        most = max(most, sum(bucket.waiting for bucket in together) + sum(rounds[: len(together)]))
    return most


def ratio(gradient_bytes: int, traffic: Traffic, world_size: int, per_host: int = 1) -> float:
    """Return the bytes sent by uncompressed ring all-reduces of the gradients, divided by the bytes sent now.

    `per_host`: ranks of a host, if what is sent now travels in two levels: then uncompressed gradients do, too.
    """
    return _ratio(_uncompressed(gradient_bytes, world_size, per_host), traffic, world_size)


def _uncompressed(gradient_bytes: int, world_size: int, per_host: int) -> Traffic:
    hosts = world_size // per_host
    return Traffic(1, gradient_bytes, 2 * (hosts - 1) / hosts * gradient_bytes / per_host)


def _ratio(before: Traffic, now: Traffic, world_size: int) -> float:
    """Return the ratio of the bytes sent; on one rank of those given to collectives."""
    old, new = ((each.sent_bytes if world_size > 1 else each.payload_bytes) for each in (before, now))
    return old / new if new else 1.0


def bucket_layouts(
    ready: Mapping[str, Tensor],
    bucket_mb: float | None,
    ranks: Ranks,
    device: torch.device = META,
) -> list[Layout]:
    """DDP's buckets, in the order sent, once it has rebuilt them: parameters as they get ready, one dtype a bucket."""
    names, parameters = list(ready), list(ready.values())
    layouts = []
    for members in assigned(parameters, caps_in_bytes(bucket_mb), [False] * len(parameters)):
        named = {names[index]: parameters[index] for index in members}
        dtype = parameters[members[0]].dtype.to_real()
        layouts.append(layout_of(named, dtype, device, ranks))
    return layouts
