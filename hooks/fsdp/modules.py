"""The modules of an FSDP2 model and their parameters, and all use of torch's own state, such as when it reads gradients."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress import Layout, Ranks
from ...compress.shards.layout import ShardLayout
from ...compress.shards.weights import WeightKind
from ...ddp_core import plain
from ...ddp_core.transport.parts_of_world import part_of_world
from ...kernels import temporary
from ..model_kinds import is_a, sharded_modules

SINCE = "2.9"  # the torch whose FSDP2 takes communication of others


class OneRank(dist.ProcessGroup):
    """A group of this rank alone, in which torch's all-reduce sends and changes nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allreduce(self, *_: Any) -> Any:
        """Return None, no work that torch would wait for: the tensors are their own sums."""


class OneBuffer:
    """The reduce-scatter of one rank. torch asks for memory for input and result, and copies: both are one tensor."""

    def __init__(self, torchs: Any) -> None:
        self._torchs = torchs
        self._result: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is reduced, and the same tensor for the result, which is asked for next."""
        result, self._result = self._result, None
        if result is None or result.shape != torch.Size(size) or result.dtype != dtype:
            self._result = result = temporary(size, dtype=dtype, device=device)
        return result

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Reduce and scatter as torch does."""
        return self._torchs(*arguments, **options)


class OwnDivisor(float):
    """A divisor of gradients that gradwire has set, and not the user."""


class ShardedModule:
    """A module with torch's group of its parameters, which have these `names`, in order. `index`: of it in the model.

    `fully_shard` was applied to it, or `replicate`: then its parameters are `whole` on each rank.
    """

    def __init__(self, module: Any, group: Any, index: int, names: tuple[str, ...]) -> None:
        self.module, self.group, self.index, self.names = module, group, index, names
        self.whole = is_a(module, "ReplicateModule")
        self.device: torch.device = group.device
        self._layout: tuple[tuple[int, ...], ShardLayout] | None = None  # of these of the parameters
        self.sums = False  # whether gradwire sums its gradients over shards
        if not self.whole:
            self.shard_group: dist.ProcessGroup = group.mesh_info.shard_process_group  # that share the parameters
        # the ranks that have the same shards, in hybrid sharding
        self.replica_group: dist.ProcessGroup | None = getattr(group.mesh_info, "replicate_process_group", None)
        # no other rank shares its parameters: torch then calls nobody to gather or to reduce them.
        self.alone = self.whole or self.shard_group.size() == 1
        self._before = (
            group._all_gather_comm,
            group._reduce_scatter_comm,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
            group.mesh_info,
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that share the parameters; of a module that is `whole` those that average its gradients."""
        group = self.replica_group if self.whole else self.shard_group
        assert group is not None
        return group

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank among those of the mesh, and how many these are."""
        ranks = self.group.mesh_info.mesh.mesh.flatten().tolist()
        return ranks.index(dist.get_rank()), len(ranks)

    @property
    def part(self) -> str:
        """Part of the world that the ranks of the mesh are: see `part_of_world`."""
        return part_of_world(self.group.mesh_info.mesh.mesh.flatten().tolist(), dist.get_world_size())

    @property
    def in_forward(self) -> bool:
        """True if a forward needs the weights, of this module or of one that prefetches them; not after `unshard()`."""
        return bool(self.group._training_state.name == "FORWARD")

    @property
    def in_backward(self) -> bool:
        """True from the first gradients of a backward to its end, which one that raises an error never has."""
        return bool(getattr(self.module._get_fsdp_state()._state_ctx, "post_backward_final_callback_queued", False))

    @property
    def divisor(self) -> float | None:
        """The divisor of gradients, before `take` the user's; None if they are divided by the number of ranks."""
        divisor: float | None = self.group.gradient_divide_factor
        return divisor

    @property
    def divided_anew(self) -> bool:
        """True if torch's divisor is the user's: set since `take`, or where there was none."""
        divisor = self.group.gradient_divide_factor
        return divisor is not None and not isinstance(divisor, OwnDivisor)

    @property
    def takes_communication(self) -> bool:
        """True if others may communicate for the module: neither gradwire nor somebody else does yet."""
        mine = (self.group._all_gather_comm, self.group._reduce_scatter_comm)
        default = all(type(comm).__module__.startswith("torch.") for comm in mine)
        return default and self.group._all_reduce_hook is None

    @property
    def _places(self) -> tuple[int, ...]:
        """The indices of the parameters whose gradients travel, in the order of these."""
        params = self.group.fsdp_params
        # a newer torch has sorted them by the dtype of gradients, from the first forward on
        order = getattr(self.group, "_reduce_scatter_param_indices", None) or range(len(params))
        return tuple(place for place in order if params[place].sharded_param.requires_grad)

    def layout(self) -> ShardLayout:
        """The parameters whose gradients travel, in the order in which they lie in a reduce-scatter's input.

        In the dtype of arithmetic: what they travel in is known when they do.
        """
        places = self._places
        if self._layout is None or self._layout[0] != places:
            self._layout = places, self._layout_of(places)
        return self._layout[1]

    @cached_property
    def kinds(self) -> tuple[WeightKind, ...]:
        """The parameters, by the type they are gathered in; nothing where one gives torch other numbers than its own."""
        params, places = self.group.fsdp_params, dict[torch.dtype, list[int]]()
        if any(hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") for param in params):
            return ()
        dtypes = [_gathered_dtype(param) for param in params]
        for place, dtype in enumerate(dtypes):
            places.setdefault(dtype, []).append(place)
        every = self._layout_of(tuple(range(len(params))))
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(every.shapes, dtypes, strict=True)]
        ends = list(itertools.accumulate(sizes))
        return tuple(
            WeightKind(
                dtype, self._layout_of(tuple(of)), tuple((ends[place] - sizes[place], ends[place]) for place in of)
            )
            for dtype, of in places.items()
        )

    def _layout_of(self, places: tuple[int, ...]) -> ShardLayout:
        params, group = self.group.fsdp_params, self.shard_group
        names = tuple(self.names[place] for place in places)
        shapes = tuple(tuple(params[place]._orig_size) for place in places)
        wide = torch.float64 if any(param.sharded_param.dtype == torch.float64 for param in params) else torch.float32
        unsharded = Layout(names, shapes, wide, self.device, Ranks(group.size(), group.rank()))
        return ShardLayout(unsharded, tuple(params[place].fsdp_placement.dim for place in places))

    @property
    def left_out(self) -> str:
        """The error message for a backward that leaves parameters out."""
        return (
            f"some parameters of a sharded module ({', '.join(self.names[:3])}, ...) have no gradient in this backward, and "
            "torch does not report which, but each has a residual: call set_reduce_scatter_unused_params(True) "
            "on the model, where torch has it, or reduce without residuals, as 'int8' or 'int4:error_feedback=false' do"
        )

    @property
    def averages_over_replicas(self) -> bool:
        """True if torch, or a hook, averages shards of gradients over replicas when its reduce-scatter has returned."""
        return hasattr(self.group.mesh_info, "replicate_process_group") or self.group._all_reduce_hook is not None

    def reads_gradients(self, dtype: torch.dtype) -> bool:
        """Return True if torch reads shards of gradients of a dtype on arrival: it divides, adds up, casts or moves them.

        It then must not get them late. In float32 and bfloat16 a collective divides, unless sums are forced; else torch
        does, before and after it or after it alone, where the divisor is not 1.
        """
        group = self.group
        divisor = group.gradient_divide_factor
        if group.force_sum_reduction_for_comms or dtype not in (torch.float32, torch.bfloat16):
            ranks = 1 if self.alone else self.shard_group.size()
            if (ranks if divisor is None else divisor) != 1:
                return True
        for param in group.fsdp_params:
            shard = param.sharded_param
            expected = getattr(param, "sharded_grad_dtype", None) or shard.dtype
            hooked = getattr(shard, "_post_accumulate_grad_hooks", None)
            if shard.grad is not None or dtype != expected or param.offload_to_cpu or hooked:
                return True
        return False

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

    def shards(self) -> dict[str, Tensor]:
        """This rank's shard, with its padding, of each parameter whose gradients travel."""
        params = [(self.names[place], self.group.fsdp_params[place]) for place in self._places]
        return {name: param._sharded_param_data.view(param.padded_sharded_param_size) for name, param in params}

    def splits(self) -> list[int]:
        """Return the lengths of the runs of `shards` that a tensor-parallel model has whole on all of its ranks, or cut.

        Whole parameters must have the same averages on all of these ranks, so they are compressed apart from the others.
        """
        kinds = [_placements(self.group.fsdp_params[place]) for place in self._places]
        return [len(list(alike)) for _, alike in itertools.groupby(kinds)]

    def take_replicas(self, hook: Callable[[Tensor], None]) -> None:
        """Have a hook average over replicas in place of torch, for which this rank then is the only replica."""
        self.module.set_all_reduce_hook(hook)
        if self.whole and self.device.type == "cpu":  # on CUDA both buffers belong to streams of their own
            self.group._reduce_scatter_comm = OneBuffer(self.group._reduce_scatter_comm)
        self.group.mesh_info = copy.copy(self.group.mesh_info)  # other groups may have it, and `give_back` restores it
        self.group.mesh_info.replicate_process_group = OneRank()


def _gathered_dtype(param: Any) -> torch.dtype:
    """Return the type in which a parameter is gathered. torch notes it, too, but not before the first forward."""
    own: torch.dtype = param.sharded_param.dtype
    given: torch.dtype | None = param.mp_policy.param_dtype
    return given if given is not None and own.is_floating_point else own


def _placements(param: Any) -> Sequence[bool]:
    """Along which axes of a mesh with tensor parallelism a parameter is whole; empty if it does not take part in that."""
    return [each.is_replicate() for each in param.sharded_param.placements] if param.is_dtensor else ()


def modules_of(model: nn.Module, *, whole: bool = False) -> list[ShardedModule]:
    """The sharded or replicated modules of a model that have parameters. `whole`: errors call them replicated.

    Raises RuntimeError for a torch before 2.9, ValueError for what cannot be served, with the way out.
    """
    names = {module: plain(name) for name, module in model.named_modules(remove_duplicate=False)}
    found: list[ShardedModule] = []
    for module in sharded_modules(model):
        if not hasattr(module, "set_custom_reduce_scatter"):
            raise RuntimeError(f"FSDP2 takes communication of others since torch {SINCE}, this is {torch.__version__}")
        for group in _groups(module, names[module]):
            inside = tuple(_name(param._module_info, names) for param in group.fsdp_params)
            if all(each.group is not group for each in found):  # one of several modules, too
                found.append(ShardedModule(module, group, len(found), inside))
    if not found:
        raise ValueError("none of its sharded modules has parameters")
    if taken := [each for each in found if not each.takes_communication]:
        raise ValueError(
            f"somebody communicates for {len(taken)} of its {len(found)} {'replicated' if whole else 'sharded'} modules "
            "already: attach once, or close() the handle first"
        )
    if len({id(each.process_group) for each in found}) > 1:
        raise ValueError("its modules are on different process groups: attach to each of these parts by itself")
    return found


def _groups(module: Any, name: str) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else list(groups)
    if len(groups) > 1:
        raise ValueError(
            f"module {name!r} has {len(groups)} groups of parameters on meshes of their own, among which torch does not let "
            "communication choose: call fully_shard on the submodules, with a mesh for each"
        )
    return [group for group in groups if group is not None and group.fsdp_params]


def _name(info: Any, names: dict[nn.Module, str]) -> str:
    return ".".join(filter(None, (names[info.module], info.param_name)))
