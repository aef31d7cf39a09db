"""Forwards inside torch.func's transforms, such as jvp, whose collectives are not to be transformed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

Function = TypeVar("Function", bound=Callable[..., Any])


def transformed() -> bool:
    """Return True inside a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms(function: Function) -> Function:
    """Have a function run outside of all transforms that it is called in."""

    @wraps(function)
    def call(*arguments: Any, **named_arguments: Any) -> Any:
        if not transformed():
            return function(*arguments, **named_arguments)
        with temporarily_clear_interpreter_stack():
            return function(*arguments, **named_arguments)

    return call  # type: ignore[return-value]
