"""Flags that the host asks for later."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceFlag:
    """A flag on its way from the device to the host; only reading it waits, and by the next step it has arrived."""

    def __init__(self, flag: Tensor) -> None:
        self._flag = flag.to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if flag.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(flag.get_device()))

    def __bool__(self) -> bool:
        if self._arrived is not None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a step of a compressor that remembers what it held back cannot be captured in a CUDA graph, since "
                    "the host asks whether the step before counts: capture steps of none, bf16 or fp16"
                )
            self._arrived.synchronize()
        return bool(self._flag)
