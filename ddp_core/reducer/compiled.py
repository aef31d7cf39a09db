"""Where parameters are used and nobody can notice: code that is not run by Python, operation by operation."""

from __future__ import annotations

import sys

import torch
from torch import nn


def compiles() -> bool:
    """Whether anything in this process went through torch.compile: its graphs take parameters as they are."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return any(backend is not None for backend in tuple(getattr(dynamo, "cached_backends", {}).values()))


def in_compiled_backward() -> bool:
    """Return True inside a backward that compiled autograd runs."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False))


def scripted(module: nn.Module) -> bool:
    """Whether any part of a model is TorchScript."""
    return any(isinstance(each, torch.jit.ScriptModule) for each in module.modules())
