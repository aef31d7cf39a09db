"""A node between an output of forward and the loss, by which the reducer learns that a backward begins."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


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
