"""What a framework's loggers are given of the compression."""

from __future__ import annotations

from ...ddp_core import Handle


def scalars(handle: Handle) -> dict[str, float]:
    """`handle.metrics()`, by the names under which they are logged; empty before the first synced step."""
    return {f"gradwire/{name}": value for name, value in handle.metrics().items()} if handle.called else {}
