"""The choice of a transport for a process group's ranks on a device.

A new kind of transport is one file beside this one, and one line in `transport_of`.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from .host_memory import HostMemory
from .process_group import ProcessGroup
from .protocol import Decorator, Transport
from .setup_agreement import Check


def transport_of(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta,
    check: Check,
    decorate: Decorator | None = None,
    *,
    alone: bool = True,
) -> Transport:
    """Return what carries requests on a device: the process group; on CPUs around it the memory that a host's ranks share.

    `timeout` and `check`: see `ProcessGroup`. `decorate`: what to put around it. `alone`: all buckets go over this group.
    """
    transport: Transport = ProcessGroup(group, device, timeout, check)
    if device.type == "cpu" and alone:
        transport = HostMemory(transport, check)
    return transport if decorate is None else decorate(transport)
