"""A node between the outputs of forward and the loss, by which the reducer learns that a backward begins."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .reducer import Reducer


class Sink(torch.autograd.Function):
    """Passes tensors through. Outputs that the loss leaves out get no gradient instead of zeros."""

    @staticmethod
    def forward(ctx: Any, reducer: weakref.ref[Reducer], clone: bool, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.reducer = reducer
        return tuple(output.clone() for output in outputs) if clone else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if (reducer := ctx.reducer()) is not None:
            reducer.start()
        return (None, None, *grads)


def watched(output: Any, reducer: Reducer, *, clone: bool) -> Any:
    """`output` with every tensor that has a graph behind it led through a sink; its structure is kept."""
    items, structure = tree_flatten(output)
    places = [place for place, item in enumerate(items) if isinstance(item, Tensor) and item.grad_fn is not None]
    if not places:
        return output
    passed = Sink.apply(weakref.ref(reducer), clone, *(items[place] for place in places))
    for place, tensor in zip(places, passed, strict=True):
        items[place] = tensor
    return tree_unflatten(items, structure)


def tensors_in(output: Any) -> list[Tensor]:
    """All tensors of a structure."""
    return [item for item in tree_flatten(output)[0] if isinstance(item, Tensor)]
