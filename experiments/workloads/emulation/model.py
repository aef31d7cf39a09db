"""An emulated accelerator: a model whose layers take the time of a trace, and hardly any of this host's."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...kernels.heavy_tail import HeavyTail
from .trace import Layer, Trace

POOL = 2**20  # numbers that a gradient takes in one piece: the pool is twice that, 8 MiB


@dataclass
class Stream:
    """A sequence of layers on an emulated device, each of which begins when the one before ends.

    What the host does between two layers (communication hooks, say) delays the next, as it runs on the same thread. What
    a sleep lasts too long does not: it is taken off the next, or off what that has to wait.
    """

    late_seconds: float = 0.0

    def take(self, parameters: Iterable[Tensor]) -> None:
        """Use the parameters of the next layer as a real one would, which waits for those whose update is pending."""
        begin = time.perf_counter()
        for parameter in parameters:
            parameter.view_as(parameter)
        self.late_seconds = max(0.0, self.late_seconds - (time.perf_counter() - begin))

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """A layer: the block, and then sleep, until its seconds are over."""
        end = time.perf_counter() - self.late_seconds + seconds
        yield
        if (remaining := end - time.perf_counter()) > 0:
            time.sleep(remaining)
        self.late_seconds = max(0.0, time.perf_counter() - end)


@dataclass
class Pass:
    """One forward and the backward that belongs to it."""

    dilate: float = 1.0
    forward: Stream = field(default_factory=Stream)
    backward: Stream = field(default_factory=Stream)


class EmulatedLayer(torch.autograd.Function):
    """A layer, as autograd sees it: it hands a number on, and in backward the number's gradient and its own.

    The gradients of the parameters are drawn while the layer's seconds pass, and released when they are over.
    """

    @staticmethod
    def forward(ctx: Any, carried: Tensor, current: Pass, layer: Layer, *parameters: Tensor) -> Tensor:
        """The number carried along, () float32, once the layer's forward is over."""
        with current.forward.busy(layer.forward_seconds * current.dilate):
            ctx.current, ctx.layer, ctx.parameters = current, layer, parameters
            return carried.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of `carried` unchanged, and those of the parameters: of a heavy tail, times the former."""
        (gradient,) = gradients
        with ctx.current.backward.busy(ctx.layer.backward_seconds * ctx.current.dilate):
            scale = gradient.item()
            wanted = zip(ctx.parameters, ctx.needs_input_grad[3:], strict=True)
            drawn = [drawn_gradient(parameter, scale) if needed else None for parameter, needed in wanted]
        return gradient, None, None, *drawn


def drawn_gradient(parameter: Tensor, scale: float) -> Tensor:
    """A gradient for a parameter, different each time and on each rank."""
    gradient = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    _numbers(gradient.device, dist.get_rank() if dist.is_initialized() else 0).fill(gradient)
    return gradient if scale == 1 else gradient.mul_(scale)


@functools.cache
def _numbers(device: torch.device, rank: int) -> HeavyTail:
    """The random numbers of a rank, drawn once."""
    numbers = HeavyTail(POOL, device)
    numbers.restart(rank)
    return numbers


class EmulatedModel(nn.Module):
    """Parameters of the real names and shapes, all zero, and layers that take the time of a trace.

    forward takes anything and returns a scalar, 0, whose backward gives every parameter a gradient, in the order and at
    the times of the trace. Gradients are drawn from random numbers with a heavy tail and are linear in the gradient of
    that scalar, so that loss scaling works.

    Args:
        trace: the trace.
        dilate: factor of all seconds.

    Raises:
        ValueError: the factor is not above 0, or no module can have a parameter of a name in the trace.
    """

    def __init__(self, trace: Trace, dilate: float = 1.0) -> None:
        super().__init__()
        if not 0 < dilate < math.inf:
            raise ValueError(f"dilate is a number above 0, got {dilate}")
        self.trace, self.dilate = trace, dilate
        self._last = Pass()
        for name, shape in trace.parameters.items():
            _add(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, *inputs: Any) -> Tensor:
        """0, of shape (), once the forward of all layers is over. What goes in does not matter."""
        self._last = current = Pass(self.dilate)
        parameters = dict(self.named_parameters(remove_duplicate=False))
        device = next(iter(parameters.values())).device
        carried = torch.zeros((), device=device, requires_grad=True)  # so layers without parameters have a backward
        for layer in self.trace.layers:
            own = [parameters[layer.full(name)] for name in layer.parameters]
            current.forward.take(own)
            carried = EmulatedLayer.apply(carried, current, layer, *own)
        return carried

    @property
    def late_seconds(self) -> float:
        """Seconds that the last forward and backward took beyond the trace, as this host could not keep up."""
        return self._last.forward.late_seconds + self._last.backward.late_seconds

    def extra_repr(self) -> str:
        """The trace and its time."""
        return f"{self.trace.name}, {self.trace.seconds * self.dilate:g} s per step"


def _add(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Give a module a parameter of a dotted name, with the modules in between."""
    *modules, last = name.split(".")
    try:
        for part in modules:
            if part not in root._modules:
                root.add_module(part, nn.Module())
            root = root.get_submodule(part)
        root.register_parameter(last, parameter)
    except KeyError as error:
        raise ValueError(f"no module can have a parameter called {name!r}: {error.args[0]}") from error
