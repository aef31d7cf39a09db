"""Traces of a real model, from its floating-point operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .trace import BACKWARD_OF_FORWARD, Layer, Shape, Trace

Mark: TypeAlias = tuple[str, int]  # a layer, and what the meter showed when it began
Shares: TypeAlias = dict[str, float]


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
    from torch.utils.flop_counter import FlopCounterMode  # here, since it takes a second to import

    if not samples_per_second > 0:
        raise ValueError(f"samples_per_second is above 0, got {samples_per_second}")
    shadow, batch = copy.deepcopy(model).to("meta"), inputs.to("meta")
    units = units_of(shadow, batch)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        marks: list[Mark] = []
        with _marking(shadow, units, marks, counter.get_total_flops):
            shadow(batch)
        operations = _shares(marks, counter.get_total_flops(), units)
    total = sum(operations.values()) * (1 + BACKWARD_OF_FORWARD)
    if not total:
        raise ValueError(f"{name} has no floating-point operations that torch counts, so no layer's time is known")
    second = len(batch) / samples_per_second / total
    forward = {unit: count * second for unit, count in operations.items()}
    backward = {unit: seconds * BACKWARD_OF_FORWARD for unit, seconds in forward.items()}
    return _trace(name, source, len(batch), model, forward, backward)


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


def _shares(marks: Sequence[Mark], end: int, units: Sequence[str]) -> Shares:
    """What the meter ran on from each unit's beginnings to the next unit's, in the order of `units`."""
    found = dict.fromkeys(units, 0.0)
    ends = [reading for _, reading in marks[1:]] + [end]
    for (name, reading), following in zip(marks, ends, strict=True):
        found[name] += following - reading
    return found


def _trace(name: str, source: str, batch_size: int, model: nn.Module, forward: Shares, backward: Shares) -> Trace:
    owned: dict[str, dict[str, Shape]] = {unit: {} for unit in forward}
    others: dict[str, dict[str, Shape]] = {}
    for parameter, tensor in model.named_parameters():
        parts = parameter.split(".")
        prefixes = [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]
        unit = next((each for each in prefixes if each in owned), None)
        place, key = (others, prefixes[0]) if unit is None else (owned, unit)
        place.setdefault(key, {})[parameter.removeprefix(f"{key}.")] = tuple(tensor.shape)
    early = tuple(Layer(module, parameters, 0.0, 0.0) for module, parameters in others.items())
    layers = (Layer(unit, owned[unit], forward[unit], backward[unit]) for unit in forward)
    return Trace(name, source, batch_size, (*early, *layers))
