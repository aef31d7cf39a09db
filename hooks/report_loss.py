"""`gradwire.report_loss`: the losses of a training script, for `gradwire try`."""

import json
import os
import time
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..ddp_core import Observed
from ..ddp_core.transport.process_group import over
from ..ddp_core.transport.rank_messages import exchange

COMPRESSOR = "GRADWIRE_COMPRESSOR"  # the compressor that the script is to use
FOLDER, STEPS = "GRADWIRE_TRY_FOLDER", "GRADWIRE_TRY_STEPS"  # for the files of ranks; the steps until the script ends
SENT = ("sent_bytes", "ratio")  # of the measurements of a step
ALONE = "on_cpus_of_one_host"  # all ranks are


class _Steps:
    """The file of one rank, with a line per step. After the last one each host has the files of all ranks."""

    def __init__(self, folder: str, steps: int) -> None:
        self._folder, self._left = Path(folder), steps
        self._file = self._path(dist.get_rank()).open("w", buffering=1, encoding="utf-8")
        one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size())
        self._place = {ALONE: True} if one_host and not torch.cuda.is_available() else {}

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05}.jsonl"

    def add(self, loss: float, handle: Observed | None) -> None:
        """Write a step; after the last one, end the script."""
        measured = {} if handle is None else handle.metrics()
        sent = {name: value for name, value in measured.items() if name in SENT}
        self._file.write(json.dumps({"loss": loss, "at": time.perf_counter(), **sent, **self._place}) + "\n")
        self._left -= 1
        if not self._left:
            self._file.close()
            self._share()
            raise SystemExit(0)

    def _share(self) -> None:
        """Have the files of other hosts' ranks on this host, too, so that all hosts print the same."""
        assert dist.group.WORLD is not None
        own = self._path(dist.get_rank()).read_text("utf-8")
        texts = exchange(own, over(dist.group.WORLD), what="losses of their steps")
        if os.environ.get("LOCAL_RANK", "0") == "0":
            for path, text in zip(map(self._path, range(len(texts))), texts, strict=True):
                if not path.exists():
                    path.write_text(text, "utf-8")


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
        _steps(folder, int(os.environ[STEPS])).add(loss.item() if isinstance(loss, Tensor) else loss, handle)
