"""What a training has sent, however it averages."""

from __future__ import annotations

from dataclasses import dataclass

from ...compress import Traffic
from ...ddp_core import Handle
from ...hooks.fsdp import ShardHandle
from ..results.comparison import Seconds

NOT_MEASURED = Seconds(encode=0.0, wait=0.0, decode=0.0)


@dataclass(frozen=True)
class Communication:
    """`traffic` and `seconds` of an optimizer step; `averages`: of the same numbers, so far, such as steps or rounds."""

    traffic: Traffic
    total_sent_bytes: float
    seconds: Seconds
    averages: int


def of_handle(handle: Handle | ShardHandle) -> Communication:
    """What compression has sent: in the last step, and in all."""
    stats = handle.stats()
    total, steps = stats.total, stats.steps
    seconds = Seconds(encode=total.encode / steps, wait=total.wait / steps, decode=total.decode / steps)
    return Communication(stats.last.traffic, total.traffic.sent_bytes, seconds, steps)


def of_torch(traffic: Traffic, steps: int) -> Communication:
    """What torch sends in each step."""
    return Communication(traffic, traffic.sent_bytes * steps, NOT_MEASURED, steps)
