"""Layers and traces of a real model, from its floating-point operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .definitions import LayerDefinition, timed
from .trace import Shape, Trace

Mark: TypeAlias = tuple[str, int]  # a layer, and what the meter showed when it began


def from_flops(model: nn.Module, inputs: Tensor, *, name: str, source: str, samples_per_second: float) -> Trace:
    """Make a trace of a model: each layer's share of the time is its share of the floating-point operations.

    Nothing is computed: a copy of the model runs on the meta device. Backward counts twice.

    Args:
        model: the model, which may be on the meta device.
        inputs: a batch.
        name: the trace's name.
        source: the origin of `samples_per_second`, in words.
        samples_per_second: the throughput of one accelerator.

    Returns:
        The trace.

    Raises:
        ValueError: the throughput is not above 0, or torch counts no operations in the model.
    """
    if not samples_per_second > 0:
        raise ValueError(f"samples_per_second is above 0, got {samples_per_second}")
    layers = layers_of(model, inputs)
    if not any(layer.operations for layer in layers):
        raise ValueError(f"{name} has no floating-point operations that torch counts, so no layer's time is known")
    return timed(name, source, len(inputs), layers, len(inputs) / samples_per_second)


def layers_of(model: nn.Module, inputs: Tensor) -> list[LayerDefinition]:
    """Return the layers of a model in the order of forward, with the operations of a batch, by a run on the meta device.

    Parameters outside of modules that are called come first.
    """
    from torch.utils.flop_counter import FlopCounterMode  # here, since it takes a second to import

    shadow, batch = copy.deepcopy(model).to("meta"), inputs.to("meta")
    units = units_of(shadow, batch)
    marks: list[Mark] = []
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        with _marking(shadow, units, marks, counter.get_total_flops):
            shadow(batch)
        ends = [reading for _, reading in marks[1:]] + [counter.get_total_flops()]
    operations = dict.fromkeys(units, 0)
    for (unit, reading), following in zip(marks, ends, strict=True):
        operations[unit] += following - reading
    owned: dict[str, dict[str, Shape]] = {unit: {} for unit in units}
    others: dict[str, dict[str, Shape]] = {}
    for parameter, tensor in model.named_parameters():
        parts = parameter.split(".")
        prefixes = [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]
        unit = next((each for each in prefixes if each in owned), prefixes[0])
        place = owned[unit] if unit in owned else others.setdefault(unit, {})
        place[parameter.removeprefix(f"{unit}.")] = tuple(tensor.shape)
    early = [LayerDefinition(module, parameters) for module, parameters in others.items()]
    return [*early, *(LayerDefinition(unit, owned[unit], operations[unit]) for unit in units)]


def units_of(model: nn.Module, inputs: Tensor) -> list[str]:
    """The modules that a forward calls and that call no other, in the order of their first call."""
    calls: list[Mark] = []
    with _marking(model, [name for name, _ in model.named_modules()], calls, lambda: 0), torch.no_grad():
        model(inputs)
    called = dict.fromkeys(name for name, _ in calls)
    parents = {"", *(name[:end] for name in called for end, letter in enumerate(name) if letter == ".")}
    return [name for name in called if name not in parents or len(called) == 1]


@contextmanager
def _marking(model: nn.Module, units: Sequence[str], marks: list[Mark], meter: Callable[[], int]) -> Iterator[None]:
    """Read the meter whenever the forward of a unit begins."""

    def hook_for(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, arguments: marks.append((name, meter()))

    handles = [model.get_submodule(name).register_forward_pre_hook(hook_for(name)) for name in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
