"""Two DistributedDataParallel around the same parameters: both would average, one of them without compression."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


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
