"""The handle of a model that compresses its gradients."""

from __future__ import annotations

from weakref import WeakValueDictionary

from torch import Tensor, nn

from ..ddp_core import DistributedDataParallel, Handle

# By identities of parameters, which the handles keep alive: torch gives a hook nothing but its bucket's parameters, and an
# attribute of a parameter would be saved with the model.
_handles: WeakValueDictionary[int, Handle] = WeakValueDictionary()


def remember(handle: Handle, model: nn.Module) -> None:
    """Have a model's parameters lead to its handle; the last one of several counts."""
    _handles.update((id(each), handle) for each in model.parameters() if each.requires_grad)


def handle_with(parameter: Tensor) -> Handle | None:
    """Return the handle of the model that a parameter is of; None if there is none."""
    return _handles.get(id(parameter))


def handle_of(model: nn.Module) -> Handle:
    """Return the handle of a model whose gradients gradwire compresses: `gradwire.handle_of(ddp_model).state_dict()`.

    Args:
        model: the model that `attach` was called on or a hook was registered on, gradwire's DistributedDataParallel, or a
            framework's wrapper of one of these.

    Returns:
        The handle.

    Raises:
        ValueError: gradwire does not compress the gradients of this model.
    """
    ours = next((each for each in model.modules() if isinstance(each, DistributedDataParallel)), None)
    if ours is not None and not ours._comm_hooks:
        return ours.compression
    found = next((handle for each in model.parameters() if (handle := _handles.get(id(each))) is not None), None)
    if found is None:
        raise ValueError(
            f"gradwire does not compress the gradients of this {type(model).__name__}: call "
            "gradwire.attach(ddp_model, 'int8'), or ddp_model.register_comm_hook(None, gradwire.comm_hooks.int8), first"
        )
    return found
