"""Traces of a real model: measured on this machine, or from its floating-point operations."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .trace import BACKWARD_OF_FORWARD, Layer, Shape, Trace

Mark: TypeAlias = tuple[str, float]  # a layer, and what the meter showed when it began
Shares: TypeAlias = dict[str, float]


def measured(
    model: nn.Module,
    inputs: Tensor,
    *,
    name: str,
    source: str,
    loss: Callable[[Any], Tensor] | None = None,
    repeats: int = 5,
) -> Trace:
    """A model's trace as this machine runs it: the median of `repeats` steps behind one that is not counted.

    `inputs` is a batch; `loss` makes a scalar of what the model returns (its sum, if not given). A layer is a module that
    calls no other; what happens between two layers counts for the earlier. On the CPU only, as accelerators run behind
    the host's back: raises ValueError for a model elsewhere.
    """
    if elsewhere := {str(each.device) for each in model.parameters()} - {"cpu"}:
        raise ValueError(f"a trace is measured on the CPU, and {name} is on {', '.join(sorted(elsewhere))}")
    if repeats < 1:
        raise ValueError(f"repeats is at least 1, got {repeats}")
    units = units_of(model, inputs)
    steps = [_timed_step(model, inputs, units, loss or _sum) for _ in range(repeats + 1)][1:]
    forward, backward = (
        {unit: statistics.median(each[way][unit] for each in steps) for unit in units} for way in (0, 1)
    )
    return _trace(name, source, len(inputs), model, forward, backward)


def from_flops(model: nn.Module, inputs: Tensor, *, name: str, source: str, samples_per_second: float) -> Trace:
    """A model's trace at a throughput: each layer's part of the time is its part of the floating-point operations.

    `inputs` is a batch. Nothing is computed: a copy runs on the meta device, so a model that lies there already costs
    nothing, whatever its size. Backward counts twice. Raises ValueError where there is nothing to count.
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
        raise ValueError(f"{name} has no floating-point operations that torch counts, so they tell no layer's time")
    second = len(batch) / samples_per_second / total
    forward = {unit: count * second for unit, count in operations.items()}
    backward = {unit: seconds * BACKWARD_OF_FORWARD for unit, seconds in forward.items()}
    return _trace(name, source, len(batch), model, forward, backward)


def units_of(model: nn.Module, inputs: Tensor) -> list[str]:
    """The modules that a forward calls and that call no other, in the order of their first call."""
    calls: list[Mark] = []
    with _marking(model, [name for name, _ in model.named_modules()], calls, time.perf_counter), torch.no_grad():
        model(inputs)
    called = dict.fromkeys(name for name, _ in calls)
    parents = {"", *(name[:end] for name in called for end, letter in enumerate(name) if letter == ".")}
    return [name for name in called if name not in parents or len(called) == 1]


def _timed_step(
    model: nn.Module, inputs: Tensor, units: Sequence[str], loss: Callable[[Any], Tensor]
) -> tuple[Shares, Shares]:
    """Seconds of each unit in a forward and in its backward."""
    forward: list[Mark] = []
    backward: list[Mark] = []
    model.zero_grad()
    with _marking(model, units, forward, time.perf_counter), _marking_gradients(model, units, backward):
        output = model(inputs)
        end = time.perf_counter()
    value = loss(output)
    value.backward()
    return _shares(forward, end, units), _shares(backward, time.perf_counter(), units)


@contextmanager
def _marking(model: nn.Module, units: Sequence[str], marks: list[Mark], meter: Callable[[], float]) -> Iterator[None]:
    """Read the meter whenever the forward of a unit begins."""

    def hook_for(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, arguments: marks.append((name, meter()))

    with _removed([model.get_submodule(name).register_forward_pre_hook(hook_for(name)) for name in units]):
        yield


@contextmanager
def _marking_gradients(model: nn.Module, units: Sequence[str], marks: list[Mark]) -> Iterator[None]:
    """Read the clock whenever the gradient of a unit's output is there, also after the context."""

    origins = set()  # a module that returns its input has no backward of its own

    def hook_for(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def mark(gradient: Tensor) -> None:
            marks.append((name, time.perf_counter()))

        def ends(module: nn.Module, arguments: Any, output: Any) -> None:
            for tensor in [each for each in _tensors(output) if each.requires_grad][:1]:
                if (origin := (tensor.grad_fn, tensor.output_nr)) not in origins:
                    origins.add(origin)
                    tensor.register_hook(mark)

        return ends

    with _removed([model.get_submodule(name).register_forward_hook(hook_for(name)) for name in units]):
        yield


@contextmanager
def _removed(handles: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shares(marks: Sequence[Mark], end: float, units: Sequence[str]) -> Shares:
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


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a module returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from _tensors(each)


def _sum(output: Any) -> Tensor:
    total = sum(each.float().sum() for each in _tensors(output))
    if not isinstance(total, Tensor):
        raise ValueError(f"the model returned {type(output).__name__}, without a tensor: give a loss")
    return total
