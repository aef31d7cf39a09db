"""`gradwire.report_loss`: the losses of a training script, for `gradwire try`."""

import json
import os
import time
from functools import cache
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from ..ddp_core import Observed

COMPRESSOR = "GRADWIRE_COMPRESSOR"  # the compressor that the script is to use
FOLDER, STEPS = "GRADWIRE_TRY_FOLDER", "GRADWIRE_TRY_STEPS"  # for the files of ranks; the steps until the script ends
SENT = ("sent_bytes", "ratio")  # of the measurements of a step


class _Steps:
    """The file of one rank, with a line per step."""

    def __init__(self, folder: str, steps: int, rank: int) -> None:
        self._file = (Path(folder) / f"rank-{rank:05}.jsonl").open("w", buffering=1, encoding="utf-8")
        self._left = steps

    def add(self, loss: float, handle: Observed | None) -> None:
        """Write a step; after the last one, end the script."""
        measured = {} if handle is None else handle.metrics()
        sent = {name: value for name, value in measured.items() if name in SENT}
        self._file.write(json.dumps({"loss": loss, "at": time.perf_counter(), **sent}) + "\n")
        self._left -= 1
        if not self._left:
            self._file.close()
            raise SystemExit(0)


_steps = cache(_Steps)


def report_loss(loss: float | Tensor, handle: Observed | None = None) -> None:
    """Report the training loss of a step to `gradwire try`. Without that command, do nothing.

    Call it on all ranks, once per step, behind `optimizer.step()`. After the steps that `gradwire try` asks for, the call
    ends the script by SystemExit.

    Args:
        loss: this rank's loss of the step. A tensor on a GPU is waited for.
        handle: what `attach` returned, or `model.compression` of gradwire's DistributedDataParallel. Without one, the
            bytes stay unknown.
    """
    folder = os.environ.get(FOLDER)
    if folder is not None:
        _steps(folder, int(os.environ[STEPS]), dist.get_rank()).add(
            loss.item() if isinstance(loss, Tensor) else loss, handle
        )
