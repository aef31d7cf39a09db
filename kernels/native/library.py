"""The compiled extension."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

NAME = "native"
INTERFACE = 4  # bindings.cpp has it too: raise both where a call means something else than it did
NONE = (None, None)  # in place of a residual's tensors


def probe() -> str:
    """Why there is no extension; empty where there is."""
    try:
        library()
    except ImportError as error:
        return f"the extension is not built ({error}); reinstall gradwire where there is a C++17 compiler"
    return ""


@functools.cache
def library() -> Any:
    """The extension module; ImportError where it was not built, or from another version's sources."""
    module = import_module("._kernels", __package__)
    if getattr(module, "interface", 1) != INTERFACE:
        raise ImportError("the present one is of another version of gradwire")
    return module
