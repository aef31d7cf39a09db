"""Bytes and seconds of a training's communication, however it averages."""

from __future__ import annotations

from dataclasses import dataclass

from ...compress import Traffic
from ...ddp_core import Handle
from ...hooks.fsdp import ShardHandle
from ...hooks.local_sgd.local_steps import LocalSteps
from ..results.comparison import Seconds

FRAGMENTS = 4  # of local SGD, at most: as gradwire.LocalSteps has it
NOT_MEASURED = Seconds(encode=0.0, wait=0.0, decode=0.0)


@dataclass(frozen=True)
class Communication:
    """`traffic` and `seconds` of an optimizer step; `averages`: of the same numbers, so far, such as steps or rounds.

    `per_host`: ranks of a host, if they traveled in two levels.
    """

    traffic: Traffic
    total_sent_bytes: float
    seconds: Seconds
    averages: int
    per_host: int = 1


def of_handle(handle: Handle | ShardHandle) -> Communication:
    """Return the communication of a compressed training."""
    stats = handle.stats()
    total, steps = stats.total, stats.steps
    seconds = Seconds(encode=total.encode / steps, wait=total.wait / steps, decode=total.decode / steps)
    return Communication(stats.last.traffic, total.traffic.sent_bytes, seconds, steps, stats.per_host)


def of_local(local: LocalSteps, steps: int) -> Communication:
    """Return the communication of local SGD, spread over `steps` optimizer steps."""
    payload, sent = (sum(getattr(each, name) for each in local.history) for name in ("payload_bytes", "sent_bytes"))
    traffic = Traffic(len(local.history), round(payload / steps), sent / steps)
    seconds = Seconds(encode=0.0, wait=local.waited / steps, decode=0.0)
    return Communication(traffic, sent, seconds, local.round // min(FRAGMENTS, local.every))


def of_torch(traffic: Traffic, steps: int) -> Communication:
    """Return the communication of a training in which torch sends `traffic` in each step."""
    return Communication(traffic, traffic.sent_bytes * steps, NOT_MEASURED, steps)
