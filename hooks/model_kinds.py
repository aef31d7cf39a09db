"""The kinds of models: of torch's DDP, of FSDP2, of `replicate`, and what frameworks put around them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

AROUND = ("_orig_mod", "_forward_module")  # where torch.compile, and Fabric, keep what they wrap


def is_a(module: nn.Module, kind: str) -> bool:
    """Return True if torch has made a module one of a kind, which older versions of torch do not have."""
    return any(each.__name__ == kind for each in type(module).__mro__)


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules whose parameters FSDP2 or `replicate` manages."""
    return [each for each in model.modules() if is_a(each, "FSDPModule")]


def is_sharded(model: nn.Module) -> bool:
    """Return True if `fully_shard` or `replicate` was applied to a model, or to modules in it."""
    return bool(sharded_modules(model))


def is_replicated(model: nn.Module) -> bool:
    """Return True if torch's `replicate` was applied to a model, or to modules in it."""
    return any(is_a(module, "ReplicateModule") for module in model.modules())


def refuse_mixed(model: nn.Module) -> None:
    """Raise ValueError if some modules are sharded and others replicated."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for name, module in model.named_modules():
        if is_a(module, "FSDPModule"):
            found[is_a(module, "ReplicateModule")].append(name or "the root")
    replicated, sharded = (", ".join(found[kind][:3]) for kind in (True, False))
    if replicated and sharded:
        raise ValueError(
            f"the model has modules of fully_shard ({sharded}) and of replicate ({replicated}): attach to each part, as in "
            "attach(model.body, gather='int8', reduce='int8') of a sharded part and attach(model.head, 'int8') of a "
            "replicated one. A module around both kinds stays as it is"
        )


def ddp_inside(model: nn.Module | None) -> DistributedDataParallel | None:
    """The DDP model that `model` is, or that torch.compile, Fabric or Accelerate have put something around; else None."""
    while model is not None and not isinstance(model, DistributedDataParallel):
        model = next((model._modules[name] for name in AROUND if name in model._modules), None)
    return model
