"""A trace's training step for a planner: its layers' times, and what a compressor sends for them over a link."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ....compress import Layout, Traffic, compressor
from ....compress.simulate import steady_traffic
from ....ddp_core.planning.link_cost import LinkCost
from ....ddp_core.planning.step_model import Piece, StepModel, layered, merged
from ....hooks.plan import bucket_layouts
from .trace import Shape, Trace

ALL = 1e9  # MiB: one bucket for everything


def step_by_layers(trace: Trace, spec: str, world_size: int, cost: LinkCost, dilate: float = 1.0) -> StepModel:
    """The step with a piece a layer, for bounds: what a compressor sends for each layer alone, once warm-ups are over."""
    model = _computation(trace, dilate)
    pieces = []
    for layer, piece in zip(trace.layers, model.pieces, strict=True):
        if layer.parameters:
            sent = _traffic(tuple(layer.parameters.values()), spec, world_size)
            pieces.append(replace(piece, wire=cost.seconds(sent.sent_bytes, sent.rounds)))
    return replace(model, pieces=tuple(pieces))


def step_by_buckets(
    trace: Trace, spec: str, world_size: int, cost: LinkCost, dilate: float = 1.0, bucket_mb: float | None = None
) -> StepModel:
    """The step with a piece a bucket, as DistributedDataParallel makes them once it has seen the order of backward."""
    model = _computation(trace, dilate)
    layers = zip(trace.layers, model.pieces, strict=True)
    pieces = {layer.full(name): piece for layer, piece in layers for name in layer.parameters}
    layouts = _layouts({name: trace.parameters[name] for name in reversed(pieces)}, bucket_mb, world_size)
    return replace(model, pieces=tuple(_bucket(layout, pieces, spec, cost) for layout in layouts))


def _computation(trace: Trace, dilate: float) -> StepModel:
    """A piece a layer, none of which sends anything."""
    return layered((layer.forward_seconds * dilate, layer.backward_seconds * dilate, 0.0) for layer in trace.layers)


def _bucket(layout: Layout, pieces: Mapping[str, Piece], spec: str, cost: LinkCost) -> Piece:
    sent = steady_traffic(compressor(spec), [layout])
    return merged([pieces[name] for name in layout.names], cost.seconds(sent.sent_bytes, sent.rounds))


@functools.lru_cache(maxsize=4096)
def _traffic(shapes: tuple[Shape, ...], spec: str, world_size: int) -> Traffic:
    """Of these parameters by themselves."""
    layouts = _layouts({str(index): shape for index, shape in enumerate(shapes)}, ALL, world_size)
    return steady_traffic(compressor(spec), layouts)


def _layouts(shapes: Mapping[str, Shape], bucket_mb: float | None, world_size: int) -> list[Layout]:
    tensors: dict[str, Tensor] = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return bucket_layouts(tensors, bucket_mb, world_size)
