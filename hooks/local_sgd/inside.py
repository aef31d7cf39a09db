"""The ranks of one site: the part of each parameter that a rank averages with its equals at other sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ddp_core.buckets.grad_bucket import plain_names
from ...ddp_core.transport.private_group import new_name, private_group
from ...ddp_core.transport.process_group import over
from ...ddp_core.transport.rank_messages import broadcast
from ..internet.client import Rendezvous
from .fixed_sites import FixedSites, GroupMeeting

Sites: TypeAlias = FixedSites | Rendezvous  # how those that take part find each other
SUPPORTED = "LocalSteps takes FSDP2 models and models of replicate() on a mesh of one dimension, the ranks of a site"


class Inside:
    """This rank among the ranks of its site; `size` 1 where the rank is the site.

    `whole`: each rank has whole parameters and averages a part of each, cut along the first axis. Otherwise FSDP2 has cut
    the parameters, and each rank averages its shards. `axis`: along which each parameter is cut, by name.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: timedelta = timedelta(0), *, whole: bool = False
    ) -> None:
        self.group, self.whole, self.axis = group, whole, dict[str, int]()
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        if group is not None:
            self._meeting = GroupMeeting(private_group(group, timeout, new_name(over(group))), timeout)

    def part(self, parameter: Tensor, rank: int | None = None) -> Tensor:
        """Return the real numbers of a parameter that a rank averages, by default this one: a view of the parameter."""
        local: Tensor = getattr(parameter.detach(), "to_local", parameter.detach)()
        real = torch.view_as_real(local) if local.is_complex() else local
        if not self.whole or self.size == 1:
            return real
        rows = real if real.dim() else real.view(1)
        return rows.tensor_split(self.size)[self.rank if rank is None else rank]

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter's numbers."""
        if self.size == 1:
            return whole
        if self.whole:
            return (whole if whole.dim() else whole.view(1)).tensor_split(self.size)[self.rank]
        chunks = whole.chunk(self.size, self.axis.get(name, 0))  # as FSDP2 cuts
        return chunks[self.rank] if self.rank < len(chunks) else whole.new_empty(0)

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks of the site, in rank order. A collective call of these ranks."""
        return self._meeting.tell(numbers) if self.size > 1 else [list(numbers)]

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Copy to all ranks of the site the part of each parameter that a rank has averaged. A collective call of these."""
        if self.group is None or not self.whole:
            return
        for source in range(self.size):
            parts = [part for each in parameters if (part := self.part(each, source)).numel()]
            if parts:
                broadcast(parts, source, over(self.group, parts[0].device), what="the model")


def show_shards(modules: Sequence[Any]) -> None:
    """Have FSDP2 put its shards in the place of whole parameters, which a forward without a backward leaves there."""
    for module in modules:
        module.reshard()


def inside_of(model: nn.Module, module: nn.Module, sites: Sites) -> Inside:
    """Return the ranks of this rank's site, as the model has them; sites that meet have equal ranks meet from now on.

    `module`: the model without DDP around it. A collective call of the ranks of a site.

    Raises ValueError for a model that is refused.
    """
    group, whole, axis = _sharded(named_parameters(module))
    fixed = isinstance(sites, FixedSites)
    if group is None and not fixed and isinstance(model, nn.parallel.DistributedDataParallel):
        group, whole = model.process_group, True
    if group is None or group.size() == 1:
        return Inside()
    if isinstance(sites, FixedSites):
        _refuse_overlap(group, sites.group)
    else:
        sites.divide(group.rank(), group.size())
    made = Inside(group, timedelta(seconds=sites.patience), whole=whole)
    made.axis = axis
    return made


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without what torch.compile puts into these."""
    plain = plain_names(name for name, _ in module.named_parameters())
    return {plain[name]: each for name, each in module.named_parameters()}


def _sharded(named: Mapping[str, Any]) -> tuple[dist.ProcessGroup | None, bool, dict[str, int]]:
    """Return the ranks that share the parameters, whether each has whole ones, and the axes along which they are cut."""
    cut = {name: each for name, each in named.items() if hasattr(each, "placements")}
    if not cut:
        return None, False, {}
    if plain := [name for name, each in named.items() if name not in cut and each.requires_grad]:
        raise ValueError(
            f"{SUPPORTED}; {plain[0]} is outside the sharded modules: call fully_shard(model) on the root, too"
        )
    mesh = next(iter(cut.values())).device_mesh
    kinds = {type(placement).__name__ for each in cut.values() for placement in each.placements}
    if (
        mesh.ndim != 1
        or any(each.device_mesh != mesh for each in cut.values())
        or kinds not in ({"Shard"}, {"Replicate"})
    ):
        raise ValueError(
            f"{SUPPORTED}; this one has a mesh of {mesh.ndim} dimensions and parameters placed {', '.join(sorted(kinds))}: "
            "shard it inside a site by fully_shard(model, mesh=init_device_mesh(device, (ranks,))) alone"
        )
    axis = {name: getattr(each.placements[0], "dim", 0) for name, each in cut.items()}
    return mesh.get_group(), kinds == {"Replicate"}, axis


def _refuse_overlap(group: dist.ProcessGroup, sites: dist.ProcessGroup) -> None:
    """Raise ValueError unless this rank alone is in both groups."""
    inside, across = dist.get_process_group_ranks(group), dist.get_process_group_ranks(sites)
    if {*inside} & {*across} != {dist.get_rank()}:
        raise ValueError(
            f"the model is sharded over ranks {', '.join(map(str, inside))}, and LocalSteps would average over ranks "
            f"{', '.join(map(str, across))}: give process_group= with one rank of each site, such as "
            "init_device_mesh(device, (sites, ranks), mesh_dim_names=('site', 'rank'))['site'].get_group(), or at="
        )
