"""A node between an output of forward and the loss, by which the reducer learns that a backward begins."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .reducer import Reducer
from .torch_reducer import TorchReducer


class Sink(torch.autograd.Function):
    """Passes a tensor through. The anchor gets no gradient: whether it is asked for one shows what kind of pass this is."""

    @staticmethod
    def forward(ctx: Any, reducer: weakref.ref[Reducer], clone: bool, anchor: Tensor, output: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.reducer = reducer
        return output.clone() if clone else output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if (reducer := ctx.reducer()) is not None:
            reducer.start()
        return None, None, None, grad


def overhear(output: Any, reducer: TorchReducer) -> None:
    """Have the reducer told when a pass of autograd comes to any tensor of `output`; the graph stays as it is."""
    me = weakref.ref(reducer)

    def tell(_: Any) -> None:
        if (listener := me()) is not None:
            listener.listen()

    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name, None) for field in dataclasses.fields(output)]
    nodes = [item.grad_fn for item in tree_leaves(output) if isinstance(item, Tensor) and item.grad_fn is not None]
    for handle in reducer.prehooks:
        handle.remove()
    reducer.prehooks = [node.register_prehook(tell) for node in nodes]


def watched(output: Any, reducer: Reducer, *, clone: bool) -> Any:
    """`output` with every tensor that has a graph behind it led through a sink of its own; its structure is kept.

    One for all would let a backward reach also the outputs that the loss leaves out.
    """
    me = weakref.ref(reducer)

    def led(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item if item.grad_fn is None else Sink.apply(me, clone, reducer.anchor, item)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            item = copy.copy(item)
            for field in dataclasses.fields(item):
                object.__setattr__(item, field.name, tree_map(led, getattr(item, field.name)))
        return item

    return tree_map(led, output)
