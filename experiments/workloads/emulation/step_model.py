"""A trace's training step for a planner: its layers' times, and what a compressor sends for them over a link."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from ....compress import Layout, Ranks, Traffic, compressor
from ....compress.simulate import steady_traffic
from ....ddp_core.measure.step_model import LinkCost, Piece, StepModel
from ...advice.slice_sizes import gradient_mb, parts_of
from ...bucket_plan import bucket_layouts
from .trace import Shape, Trace

ALL = 1e9  # MiB: one bucket for everything


def step_by_layers(trace: Trace, spec: str, world_size: int, cost: LinkCost, dilate: float = 1.0) -> StepModel:
    """Return the model of a step in which each layer's gradients are sent alone, for `optimal` and `synchronous`.

    Args:
        trace: the layers.
        spec: the compressor, after its warm-ups.
        world_size: the number of ranks.
        cost: the cost of a collective.
        dilate: factor of the trace's seconds.

    Returns:
        The model of the step.
    """
    model = _computation(trace, dilate)
    pieces = []
    for layer, piece in zip(trace.layers, model.pieces, strict=True):
        if layer.parameters:
            sent = _traffic(tuple(layer.parameters.values()), spec, world_size)
            pieces.append(replace(piece, wire=cost.seconds(sent.sent_bytes, sent.rounds)))
    return replace(model, pieces=tuple(pieces))


def step_by_slices(
    trace: Trace, spec: str, world_size: int, cost: LinkCost, slice_mb: float | None = None
) -> StepModel:
    """The step with slices of `slice_mb` MiB of payload, as gradwire.overlap makes them: buckets of that size, and of a
    larger one, where the compressor remembers nothing, parts that are ready and needed together.
    """
    cut_mb = gradient_mb(spec, Ranks(world_size), _tensors(trace.parameters).values(), slice_mb)
    model = _computation(trace)
    layers = zip(trace.layers, model.pieces, strict=True)
    parts = {layer.full(name): piece for layer, piece in layers for name in layer.parameters}
    sliced: list[Piece] = []
    for layout in _layouts(dict(reversed(trace.parameters.items())), cut_mb, world_size):
        sent, count = steady_traffic(compressor(spec), [layout]), parts_of(spec, layout, cut_mb)
        seconds = cost.seconds(sent.sent_bytes / count, sent.rounds)
        sliced += [merged([parts[name] for name in layout.names], seconds)] * count
    return replace(model, pieces=tuple(sliced))


def _computation(trace: Trace, dilate: float = 1.0) -> StepModel:
    """A piece a layer, none of which sends anything."""
    return layered((layer.forward_seconds * dilate, layer.backward_seconds * dilate, 0.0) for layer in trace.layers)


@functools.lru_cache(maxsize=4096)
def _traffic(shapes: tuple[Shape, ...], spec: str, world_size: int) -> Traffic:
    """Return the traffic of these parameters by themselves."""
    layouts = _layouts({str(index): shape for index, shape in enumerate(shapes)}, ALL, world_size)
    return steady_traffic(compressor(spec), layouts)


def _layouts(shapes: Mapping[str, Shape], bucket_mb: float | None, world_size: int) -> list[Layout]:
    return bucket_layouts(_tensors(shapes), bucket_mb, Ranks(world_size))


def _tensors(shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def layered(layers: Iterable[tuple[float, float, float]]) -> StepModel:
    """A piece a layer: (forward seconds, backward seconds, wire seconds) of each, in the order of forward.

    >>> layered([(1, 2, 5), (1, 2, 0)]).pieces[0]
    Piece(ready=4, wire=5, needed=0)
    """
    rows = list(layers)
    needed = accumulate((forward for forward, _, _ in rows), initial=0)
    ready = list(accumulate(backward for _, backward, _ in reversed(rows)))[::-1]
    pieces = (Piece(at, wire, by) for at, by, (_, _, wire) in zip(ready, needed, rows, strict=False))
    return StepModel(sum(row[0] for row in rows), sum(row[1] for row in rows), tuple(pieces))


def merged(pieces: Sequence[Piece], wire: float) -> Piece:
    """A bucket of several pieces, sent once all are ready and needed where the first of them is.

    >>> merged([Piece(1, 2, 3), Piece(2, 2, 1)], wire=3.5)
    Piece(ready=2, wire=3.5, needed=1)
    """
    return Piece(max(piece.ready for piece in pieces), wire, min(piece.needed for piece in pieces))
