"""What a running backward will reach: autograd has walked the graph before it calls the first node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def gradient_node(parameter: Tensor) -> Any:
    """The node that accumulates a parameter's gradient. It lives only as long as somebody holds it.

    It runs on the stream that is current where it is made, as with torch's DDP: training on another one would have these
    streams wait for each other parameter by parameter, and a step on the default stream cannot be captured in a CUDA graph.
    """
    with torch.enable_grad():
        return get_gradient_edge(parameter).node


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
