"""Autograd and the compiler: hooks of gradients, nodes behind outputs, which gradients come, what runs without Python."""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map

Function = TypeVar("Function", bound=Callable[..., Any])


def gradient_node(parameter: Tensor) -> Any:
    """The node that accumulates a parameter's gradient. It lives only as long as somebody holds it.

    It runs on the stream that is current where it is made, as with torch's DDP: training on another one would have these
    streams wait for each other parameter by parameter, and a step on the default stream cannot be captured in a CUDA graph.
    """
    with torch.enable_grad():
        return get_gradient_edge(parameter).node


def arriving(nodes: Sequence[Any], anchor: Any) -> list[bool] | None:
    """Return which gradient nodes the running backward will execute; None in one that accumulates no gradients.

    `torch.autograd.grad` is such a one. `anchor`: the gradient node of a tensor that is an input of every sink.
    """
    executes = torch._C._will_engine_execute_node
    if executes(anchor):
        return [executes(node) for node in nodes]
    try:
        found = [executes(node) for node in nodes]  # a backward(inputs=...), or one that passes no sink
    except RuntimeError:  # torch.autograd.grad with respect to parameters
        return None
    return found if any(found) else None


def compiles() -> bool:
    """Return True if anything in this process went through torch.compile: its graphs take parameters as they are."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return any(backend is not None for backend in tuple(getattr(dynamo, "cached_backends", {}).values()))


def keep_from_compiler(function: Function) -> Function:
    """Have torch's compiler run a function, and all that it calls, as it is, wherever compiled code calls it.

    `torch.compiler.disable` does the same by a wrapper, which costs more than a microsecond per call. This mark is on the
    code, and so on all closures of it.
    """
    as_it_is = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(as_it_is, as_it_is))
    return function


def scripted(module: nn.Module) -> bool:
    """Return True if any part of a model is TorchScript."""
    return any(isinstance(each, torch.jit.ScriptModule) for each in module.modules())


def transformed() -> bool:
    """Return True inside a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms(function: Function) -> Function:
    """Have a function run outside of all transforms that it is called in."""

    @wraps(function)
    def call(*arguments: Any, **named_arguments: Any) -> Any:
        if not transformed():
            return function(*arguments, **named_arguments)
        with temporarily_clear_interpreter_stack():
            return function(*arguments, **named_arguments)

    return call  # type: ignore[return-value]


class ParameterHooks:
    """Calls `fired(owner, index, inputs, outputs)` after each of `parameters` has got a gradient, until `detach()`.

    `owner`: a weak reference. `nodes`: they accumulate the gradients. `lock`: held by `fired` where parameters lie on
    several devices, since autograd has a thread for each GPU.
    """

    def __init__(self, parameters: Sequence[Tensor], fired: Callable[..., Any], owner: weakref.ref[Any]) -> None:
        self.nodes = list(map(gradient_node, parameters))
        self.lock = threading.RLock()
        several_devices = len({parameter.device for parameter in parameters}) > 1
        fired = keep_from_compiler(_one_at_a_time(fired, self.lock) if several_devices else fired)
        handles = [node.register_hook(partial(fired, owner, index)) for index, node in enumerate(self.nodes)]
        self.detach = weakref.finalize(self, _remove, handles)  # takes the hooks off the parameters
        self.detach.atexit = False


def weak_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method, does not keep its object alive, and does nothing once that is gone."""
    me, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*arguments: Any) -> Any:
        return None if (owner := me()) is None else function(owner, *arguments)

    return call


def _one_at_a_time(fired: Callable[..., Any], lock: threading.RLock) -> Callable[..., Any]:
    def alone(*arguments: Any) -> None:
        with lock:
            fired(*arguments)

    return alone


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


class Sink(torch.autograd.Function):
    """Passes a tensor through. The anchor gets no gradient: whether it is asked for one shows what kind of pass this is."""

    @staticmethod
    def forward(ctx: Any, reducer: weakref.ref[Any], clone: bool, anchor: Tensor, output: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.reducer = reducer
        return output.clone() if clone else output

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if (reducer := ctx.reducer()) is not None:
            reducer.start()
        return None, None, None, grad


def watched(output: Any, reducer: Any, *, clone: bool) -> Any:
    """`output` with every tensor that has a graph behind it led through a sink of its own; its structure is kept.

    Also inside dataclasses. One for all would let a backward reach also the outputs that the loss leaves out. `reducer`: a
    `Reducer`, whose file imports this one.
    """
    me = weakref.ref(reducer)

    def inside(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item if item.grad_fn is None else Sink.apply(me, clone, reducer.anchor, item)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            item = copy.copy(item)
            for name in (field.name for field in dataclasses.fields(item) if hasattr(item, field.name)):
                object.__setattr__(item, name, tree_map(inside, getattr(item, name)))
        return item

    return inside(output) if isinstance(output, Tensor) else tree_map(inside, output)
