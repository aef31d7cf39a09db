"""What a running backward will reach: autograd has walked the graph before it calls the first node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def gradient_node(parameter: Tensor) -> Any:
    """The node that accumulates a parameter's gradient. It lives only as long as somebody holds it.

    It runs on the stream that it is made on: here the device's default stream, whatever the current one is.
    """
    with torch.enable_grad():
        if not parameter.is_cuda:
            return get_gradient_edge(parameter).node
        with torch.cuda.stream(torch.cuda.default_stream(parameter.device)):
            return get_gradient_edge(parameter).node


class Nodes(Sequence[Any]):
    """The gradient nodes of parameters, which live as long as they are held here or by a graph.

    A node that has had a hook takes time for it, even after the hook was removed. One that is released, the next forward
    makes anew. On CUDA all stay, since they run on the stream that they were made on.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._held: list[Any] = list(map(gradient_node, parameters))

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: Any) -> Any:
        """The node of a parameter in the graphs that there are; a new one where there are none."""
        return self._held[index] or gradient_node(self._parameters[index])

    def hold(self, index: int) -> Any:
        """Keep a parameter's node, and with it the hooks that it gets."""
        self._held[index] = self[index]
        return self._held[index]

    def release(self, index: int) -> None:
        """Let the next forward make a node without hooks."""
        if not self._parameters[index].is_cuda:
            self._held[index] = None


def undifferentiated(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function of which no graph is to be made, even in a backward with create_graph."""
    if torch.is_grad_enabled():
        with torch.no_grad():  # entering it is dear
            function(*arguments)
    else:
        function(*arguments)


def arriving(nodes: Sequence[Any], anchor: Any) -> list[bool] | None:
    """Which of the gradient nodes the running backward will execute; None in one that accumulates no gradients.

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


def accumulates(nodes: Sequence[Any]) -> bool:
    """Whether the running pass of autograd executes any of the gradient nodes."""
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # torch.autograd.grad with respect to parameters
        return False
