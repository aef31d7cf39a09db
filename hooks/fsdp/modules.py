"""The modules of an FSDP2 model, each with the parameters that travel together. All that is read of torch's own state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress import Layout, Ranks
from ...compress.shards.layout import ShardLayout
from ...ddp_core import plain

SINCE = "2.9"  # the torch whose FSDP2 takes communication of others


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


class OwnDivisor(float):
    """A divisor of gradients that gradwire has set, and not the user."""


class ShardedModule:
    """A module to which `fully_shard` was applied, and the group of its parameters; `index` counts them in the model."""

    def __init__(self, module: Any, group: Any, index: int, names: tuple[str, ...]) -> None:
        self.module, self.group, self.index, self.names = module, group, index, names
        self._layout: tuple[tuple[int, ...], ShardLayout] | None = None  # of these of the parameters
        self.sums = False  # whether gradwire sums its gradients over shards
        self._before = (
            group._all_gather_comm,
            group._reduce_scatter_comm,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
            group.mesh_info,
        )

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that share the parameters."""
        group: dist.ProcessGroup = self.group.mesh_info.shard_process_group
        return group

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same shards, in hybrid sharding."""
        return getattr(self.group.mesh_info, "replicate_process_group", None)

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank among those of the mesh, and how many these are."""
        ranks = self.group.mesh_info.mesh.mesh.flatten().tolist()
        return ranks.index(dist.get_rank()), len(ranks)

    @property
    def training(self) -> bool:
        """True if the module is in training mode, in which steps are counted."""
        return bool(self.module.training)

    @property
    def device(self) -> torch.device:
        """The device on which the module computes."""
        device: torch.device = self.group.device
        return device

    @property
    def divisor(self) -> float | None:
        """The user's divisor of gradients; None if they are divided by the number of ranks."""
        divisor: float | None = self.group.gradient_divide_factor
        return divisor

    @property
    def divided_anew(self) -> bool:
        """True if the user has set a divisor since the handle was attached."""
        return self.divisor is not None and not isinstance(self.divisor, OwnDivisor)

    @property
    def takes_communication(self) -> bool:
        """True if others may communicate for the module: neither gradwire nor somebody else does yet."""
        mine = (self.group._all_gather_comm, self.group._reduce_scatter_comm)
        default = all(type(comm).__module__.startswith("torch.") for comm in mine)
        return default and self.group._all_reduce_hook is None

    def layout(self) -> ShardLayout:
        """The parameters whose gradients travel, in the order in which they lie in a reduce-scatter's input.

        In the dtype of arithmetic: what they travel in is known when they do.
        """
        params = self.group.fsdp_params
        order = getattr(self.group, "_reduce_scatter_param_indices", None) or range(len(params))
        places = tuple(place for place in order if params[place].sharded_param.requires_grad)
        if self._layout is None or self._layout[0] != places:
            self._layout = places, self._layout_of(places)
        return self._layout[1]

    def _layout_of(self, places: tuple[int, ...]) -> ShardLayout:
        params, group = self.group.fsdp_params, self.shard_group
        names = tuple(self.names[place] for place in places)
        shapes = tuple(tuple(params[place]._orig_size) for place in places)
        wide = torch.float64 if any(param.sharded_param.dtype == torch.float64 for param in params) else torch.float32
        whole = Layout(names, shapes, wide, self.device, Ranks(group.size(), group.rank()))
        return ShardLayout(whole, tuple(params[place].fsdp_placement.dim for place in places))

    @property
    def left_out(self) -> str:
        """The error message for a backward that leaves parameters out."""
        return (
            f"some parameters of a sharded module ({', '.join(self.names[:3])}, ...) have no gradient in this backward, and "
            "torch does not tell which, while something is remembered of each: call set_reduce_scatter_unused_params(True) "
            "on the model, where torch has it, or reduce with error_feedback=false, as in 'int8:error_feedback=false'"
        )

    @property
    def averages_over_replicas(self) -> bool:
        """True if torch, or a hook, averages shards of gradients over replicas when its reduce-scatter has returned."""
        return hasattr(self.group.mesh_info, "replicate_process_group") or self.group._all_reduce_hook is not None

    def reads_gradients(self, dtype: torch.dtype) -> bool:
        """Return True if torch reads shards of gradients of a dtype on arrival: it adds them up, casts or moves them."""
        return any(_reads(param, dtype) for param in self.group.fsdp_params)

    def take(self, gather: Any, reduction: Any, divisor: float) -> None:
        """Have others communicate. `divisor`: what torch divides gradients by, after all sums."""
        self.sums = True
        self.module.set_custom_all_gather(gather)
        self.module.set_custom_reduce_scatter(reduction)
        self.module.set_force_sum_reduction_for_comms(True)
        self.module.set_gradient_divide_factor(OwnDivisor(divisor))

    def give_back(self) -> None:
        """Have torch communicate by itself, as it did before."""
        group, (gather, reduction, divisor, force_sum, mesh) = self.group, self._before
        group._all_gather_comm, group._reduce_scatter_comm, group._all_reduce_hook = gather, reduction, None
        group.force_sum_reduction_for_comms, group.mesh_info = force_sum, mesh
        if not self.divided_anew:
            group.gradient_divide_factor = divisor

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's shard with its padding) of the parameters whose gradients travel."""
        params = dict(zip(self.names, self.group.fsdp_params, strict=True))
        for name in self.layout().whole.names:
            yield name, params[name]._sharded_param_data.view(params[name].padded_sharded_param_size)

    def take_replicas(self, hook: Callable[[Tensor], None]) -> None:
        """Have a hook average over replicas in place of torch, which takes the module for one that is only sharded."""
        self.module.set_all_reduce_hook(hook)
        info = self.group.mesh_info
        self.group.mesh_info = copy.copy(info)
        self.group.mesh_info.__class__ = next(kind for kind in type(info).__mro__ if kind.__name__ == "FSDPMeshInfo")


def _reads(param: Any, dtype: torch.dtype) -> bool:
    """Return True if torch adds up, casts, moves or shows the shard of a parameter's gradient at once."""
    shard = param.sharded_param
    expected = getattr(param, "sharded_grad_dtype", None) or shard.dtype
    hooked = getattr(shard, "_post_accumulate_grad_hooks", None)
    return shard.grad is not None or dtype != expected or param.offload_to_cpu or bool(hooked)


def modules_of(model: nn.Module) -> list[ShardedModule]:
    """The sharded modules of a model that have parameters.

    Raises RuntimeError for a torch before 2.9, ValueError for what cannot be served, with the way out.
    """
    names = {module: plain(name) for name, module in model.named_modules(remove_duplicate=False)}
    found: list[ShardedModule] = []
    for module in filter(_is_sharded, model.modules()):
        if not hasattr(module, "set_custom_reduce_scatter"):
            raise RuntimeError(f"FSDP2 takes communication of others since torch {SINCE}, this is {torch.__version__}")
        for group in _groups(module, names[module]):
            inside = tuple(_name(param._module_info, names) for param in group.fsdp_params)
            if not hasattr(group.mesh_info, "shard_process_group"):
                raise ValueError("the model is replicated and not sharded: wrap it in DDP, and attach to that")
            if all(each.group is not group for each in found):  # one of several modules, too
                found.append(ShardedModule(module, group, len(found), inside))
    if not found:
        raise ValueError("none of its sharded modules has parameters")
    if len({id(each.shard_group) for each in found}) > 1:
        raise ValueError(
            "its modules are sharded over different process groups: attach to each of these parts by itself"
        )
    return found


def _groups(module: Any, name: str) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else list(groups)
    if len(groups) > 1:
        raise ValueError(
            f"module {name!r} has {len(groups)} groups of parameters on meshes of their own, among which torch does not let "
            "communication tell: call fully_shard on the submodules, with a mesh for each"
        )
    return [group for group in groups if group is not None and group.fsdp_params]


def _name(info: Any, names: dict[nn.Module, str]) -> str:
    return ".".join(filter(None, (names[info.module], info.param_name)))
