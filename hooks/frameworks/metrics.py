"""What a framework's loggers are given of the compression."""

from __future__ import annotations

from ...ddp_core import Handle


def scalars(handle: Handle) -> dict[str, float]:
    """Of the last synced step, on this rank, by the names under which they are logged; empty before the first one."""
    if not handle.called:
        return {}
    last = handle.stats().last
    return {
        "gradwire/payload_bytes": float(last.traffic.payload_bytes),
        "gradwire/sent_bytes": last.traffic.sent_bytes,
        "gradwire/encode_seconds": last.encode,
        "gradwire/wait_seconds": last.wait,
        "gradwire/decode_seconds": last.decode,
    }
