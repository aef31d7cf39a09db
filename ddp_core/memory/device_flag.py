"""Flags that the host asks for later, and what it has to know in each step."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse_capture() -> None:
    """Raise RuntimeError while a CUDA graph is captured: what the host decides would be the same at each replay."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step of a compressor that counts its steps, or keeps residuals, cannot be captured in a CUDA graph: the host "
            "decides by the step's number and by the success of the step before. Capture steps of none, bf16 or fp16"
        )


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
            refuse_capture()
            self._arrived.synchronize()
        return bool(self._flag)
