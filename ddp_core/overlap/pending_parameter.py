"""Parameters whose update is on its way: whoever uses one waits for it first.

Such a parameter's class is `PendingParameter` for the time being. Torch then calls `__torch_function__` for functions and
methods, also with it in a list, and for attributes such as `.grad` and `.data`. Compiled graphs, TorchScript, C++ extensions
and torch.func's transforms do not call it: they see the value from before the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

UPDATE = "_gradwire_update"  # the attribute of a pending parameter that has its update, a `PendingUpdate`
_set_gradient = vars(torch._C.TensorBase)["grad"].__set__
_ATTRIBUTES = (
    "shape dtype device requires_grad layout ndim is_leaf is_cuda is_sparse is_meta "
    "itemsize nbytes is_quantized output_nr grad_fn"
)
_METHODS = (
    "size dim numel nelement stride element_size is_floating_point is_complex is_contiguous "
    "ndimension get_device is_shared is_same_size"
)
NEUTRAL: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
)  # what needs neither the value nor the gradient


class PendingParameter(nn.Parameter):
    """A parameter whose update is on its way."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for the updates of what is used, then do it."""
        if func in NEUTRAL:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func == _set_gradient and args[1] is None and type(args[0]) is PendingParameter:
            return clear(args[0], to_none=True)
        for used in _pending((args, kwargs)):
            await_update(used)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        await_update(self)
        return self.__deepcopy__(memo)  # of the class that it has now

    def __reduce_ex__(self, protocol: Any) -> Any:
        await_update(self)
        return self.__reduce_ex__(protocol)

    def __setstate__(self, state: Any) -> NoReturn:
        raise TypeError("a parameter whose update is on its way is never saved")


def await_update(parameter: Any) -> None:
    """Wait for a parameter's update, on the thread that first needs it, unless another thread just has."""
    if (update := getattr(parameter, UPDATE, None)) is not None:
        update.before_use(update)


def clear(parameter: Any, *, to_none: bool) -> None:
    """Have the gradient of a pending parameter cleared after its update."""
    getattr(parameter, UPDATE).clear(parameter, to_none=to_none)


def mark_pending(parameter: Tensor, update: Any) -> None:
    """Have whoever uses a parameter wait for its update from now on."""
    setattr(parameter, UPDATE, update)
    parameter.__class__ = PendingParameter  # the same object: modules, optimizers and graphs hold it


def restore(parameter: Tensor) -> None:
    """Let a parameter be a plain one again."""
    parameter.__class__ = nn.Parameter
    delattr(parameter, UPDATE)


def _pending(value: Any) -> Iterator[Any]:
    """The pending parameters among arguments."""
    if type(value) is PendingParameter:
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _pending(each)
    elif isinstance(value, dict):
        yield from _pending(tuple(value.values()))
