"""The arguments of torch's DistributedDataParallel: their order, defaults and checks, and models that are in one already."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ...compress.builder.spelling import did_you_mean
from ..buckets.assignment import caps_in_bytes
from ..buckets.grad_bucket import plain_names
from ..reducer.same_model import copy_from, described_parameters, verify
from ..reducer.unused_parameters import Rules
from ..transport.protocol import Transport
from ..transport.torch_groups import as_groups

REFUSED = {  # argument: the way out
    "delay_all_reduce_named_params": "leave those parameters to DistributedDataParallel, too",
    "param_to_hook_all_reduce": "leave those parameters to DistributedDataParallel, too",
    "mixed_precision": "use torch.autocast, or compressor='bf16' to send 16 bits",
}


@dataclass(frozen=True)
class Arguments:
    """The arguments after the module, by torch's names. `process_group` may be a list of groups of the same ranks.

    `check_reduction`, `batched_grad_copy` and `lazy_bucket_allocation` are taken and change nothing: gradients are always
    copied a bucket at a time.
    """

    device_ids: Sequence[int | torch.device] | None = None
    output_device: int | torch.device | None = None
    dim: int = 0
    broadcast_buffers: bool | None = None
    init_sync: bool = True
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    delay_all_reduce_named_params: Any = None
    param_to_hook_all_reduce: Any = None
    mixed_precision: Any = None
    device_mesh: Any = None
    skip_all_reduce_unused_params: bool = False
    bucket_cap_mb_list: Sequence[float] | None = None
    batched_grad_copy: bool = False
    forward_sync_buffers: bool | None = None
    lazy_bucket_allocation: bool = False

    def __post_init__(self) -> None:
        for name, way_out in REFUSED.items():
            if getattr(self, name) is not None:
                raise ValueError(f"gradwire's DistributedDataParallel does not take {name}: {way_out}")
        if self.process_group is not None and self.device_mesh is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if self.device_mesh is not None and self.device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {self.device_mesh}.")
        if isinstance(self.device_ids, str):
            raise TypeError(
                f"device_ids is a list of one device, or None; got {self.device_ids!r}. The compressor is a keyword: "
                f"DistributedDataParallel(model, compressor={self.device_ids!r})"
            )
        if self.device_ids is not None and len(self.device_ids) > 1:
            raise ValueError("device_ids can only be None or contain a single element.")

    @classmethod
    def given(cls, arguments: Sequence[Any], named: Mapping[str, Any], others: Sequence[str]) -> Arguments:
        """From a call's arguments; TypeError for an unknown name, with the nearest of ours and of `others`."""
        known = [*(field.name for field in fields(cls)), *others]
        for name in named:
            if name not in known:
                raise TypeError(f"DistributedDataParallel has no argument {name!r}{did_you_mean(name, known)}")
        return cls(*arguments, **named)

    def warn(self) -> None:
        """Tell of arguments that torch has deprecated."""
        if self.check_reduction:
            warnings.warn(
                "check_reduction is deprecated and changes nothing: leave it out", FutureWarning, stacklevel=3
            )
        if self.broadcast_buffers is not None:
            advice = (
                "its value is ignored beside forward_sync_buffers"
                if self.forward_sync_buffers is not None
                else "use forward_sync_buffers, which unlike broadcast_buffers=False still copies buffers from rank 0 "
                "once, at construction"
            )
            warnings.warn(f"`broadcast_buffers` is deprecated: {advice}", FutureWarning, stacklevel=3)

    @property
    def sync_buffers(self) -> bool:
        """True if buffers come from rank 0 before every forward."""
        choices = (self.forward_sync_buffers, self.broadcast_buffers, True)
        return next(choice for choice in choices if choice is not None)

    @property
    def sync_buffers_at_start(self) -> bool:
        """True if buffers come from rank 0 at construction; as in torch, only `broadcast_buffers=False` prevents it."""
        return self.forward_sync_buffers is not None or self.broadcast_buffers is not False

    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that buckets go over in turn."""
        if self.device_mesh is not None:
            return [self.device_mesh.get_group(mesh_dim=0)]
        if self.process_group is not None:
            return _same_ranks(as_groups(self.process_group))
        if not dist.is_initialized():
            raise RuntimeError("there is no process group yet: call torch.distributed.init_process_group() first")
        assert dist.group.WORLD is not None
        return [dist.group.WORLD]

    def rules(self) -> Rules:
        """Return the rules that the reducer needs."""
        return Rules(
            caps_in_bytes(None if self.bucket_cap_mb_list else self.bucket_cap_mb, self.bucket_cap_mb_list or None),
            self.find_unused_parameters,
            self.gradient_as_bucket_view,
            self.static_graph,
            self.skip_all_reduce_unused_params,
        )


def _same_ranks(groups: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    if len(groups) == 1:
        return list(groups)
    if not groups:
        raise ValueError("process_group is an empty list: pass one group or more, or None for the default group")
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    if any(other != ranks[0] for other in ranks):
        raise ValueError(f"groups that buckets go over in turn have the same ranks in the same order, got {ranks}")
    return list(groups)


def localize(module: nn.Module, mesh: Any) -> None:
    """Let the tensor-parallel parameters of `module` appear as local tensors, where `mesh` is one axis of several."""
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh()
    else:  # torch before 2.9
        from torch.distributed.device_mesh import _mesh_resources

        root = _mesh_resources.get_root_mesh(mesh)
    if root != mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)


def trained(module: nn.Module) -> tuple[dict[str, Tensor], list[bool]]:
    """{name: parameter} of all that get gradients averaged, and which of them get sparse ones; each parameter once.

    Raises RuntimeError where there is none, or one is not initialized yet, and TypeError for what is no module, or has
    parameters in parts.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"DistributedDataParallel takes a torch.nn.Module, got {type(module).__name__}")
    named, sparse = trained_now(module)
    refuse_parts(named)
    if not named:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    return named, sparse


def refuse_parts(named: Mapping[str, Tensor]) -> None:
    """Raise TypeError where parameters are DTensors, of which this rank has a part."""
    if parts := [name for name, parameter in named.items() if hasattr(parameter, "placements")]:
        raise TypeError(
            f"{len(parts)} parameters ({', '.join(parts[:3])}, ...) are DTensors, of which this rank has a part: pass "
            "DistributedDataParallel device_mesh=mesh['dp'], the data-parallel axis of their mesh, or use torch's "
            "replicate() and gradwire.attach"
        )


def trained_now(module: nn.Module) -> tuple[dict[str, Tensor], list[bool]]:
    """Return the result of `trained`, also where nothing trains."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    plain = plain_names(name for name, _ in module.named_parameters())
    named: dict[str, Tensor] = {}
    sparse: list[bool] = []
    seen: set[Tensor] = set()
    for prefix, owner in module.named_modules():
        for short, parameter in owner.named_parameters(prefix, recurse=False):
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise RuntimeError(
                    f"parameter {short} is not initialized: run a dummy forward pass before DistributedDataParallel"
                )
            if parameter.requires_grad and short not in ignored and parameter not in seen:
                seen.add(parameter)
                named[plain[short]] = parameter
                sparse.append(isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse)
    return named, sparse


def states(module: nn.Module, *, buffers: bool) -> dict[str, Tensor]:
    """Return all parameters, and buffers if wanted, that ranks have in common, by name."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    found: list[tuple[str, Tensor]] = list(module.named_parameters())
    if buffers:
        found += module.named_buffers()
    return {name: tensor for name, tensor in found if name not in ignored}


def share_model(module: nn.Module, transport: Transport) -> None:
    """Give all ranks the parameters of rank 0, before DDP does: an optimizer may copy them when it is made.

    A collective call. Raises RuntimeError on every rank if models differ.
    """
    parameters = states(module, buffers=False)
    verify(described_parameters(parameters), transport)
    copy_from(0, list(parameters.values()), transport)


def refuse_inside(module: nn.Module, trained: Iterable[Tensor]) -> None:
    """Raise RuntimeError where a part of `module` is in a DistributedDataParallel already, which averages `trained`, too."""
    mine = set(map(id, trained))
    for name, each in module.named_modules():
        if isinstance(each, TorchDDP) and mine & averaged(each):
            raise RuntimeError(twice(f"its {name} is one already" if name else "it is one already"))


def refuse_around(model: TorchDDP) -> None:
    """Raise RuntimeError in the forward of another one that averages the parameters of `model`, too."""
    outer = TorchDDP._active_ddp_module
    if outer is not None and outer is not model and averaged(outer) & averaged(model):
        raise RuntimeError(twice(f"one of {type(outer).__module__.partition('.')[0]} is around it"))


def averaged(model: TorchDDP) -> set[int]:
    """The identities of the parameters whose gradients it averages."""
    return {id(parameter) for parameter in model._module_parameters if parameter.requires_grad}


def twice(where: str) -> str:
    """Return the error message for a model that is in two DistributedDataParallel."""
    return (
        f"the model is in a DistributedDataParallel twice: {where}. Both would average the gradients, the other one without "
        f"compression. Wrap it once: give a framework that wraps by itself, as Accelerate's prepare() does, the bare model, "
        f"and attach to its result"
    )
