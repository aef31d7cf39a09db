"""An emulated accelerator: layers take the time of a trace, and gradients are real bytes."""

from .model import EmulatedModel
from .options import EmulationConfig
from .recording import from_flops
from .shipped import load_trace
from .step_model import step_by_layers, step_by_slices
from .trace import Layer, Trace

__all__ = [
    "EmulatedModel",
    "EmulationConfig",
    "Layer",
    "Trace",
    "from_flops",
    "load_trace",
    "step_by_layers",
    "step_by_slices",
]
