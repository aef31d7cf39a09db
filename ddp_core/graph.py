"""What a backward is going to reach: a walk over the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def reached(outputs: Iterable[Tensor], wanted: set[Any]) -> set[Any]:
    """Those of the graph nodes in `wanted` that a backward from `outputs` comes by."""
    stack = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen: set[Any] = set(stack)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                stack.append(node)
    return seen & wanted


def gradient_node(parameter: Tensor) -> Any:
    """The node that accumulates a parameter's gradient. It lives only as long as somebody holds it."""
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
