"""`gradwire.report_loss`: the losses of a training script, for `gradwire try`."""

import json
import logging
import os
import time
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..ddp_core import Observed
from ..ddp_core.transport.host_places import host_name
from ..ddp_core.transport.process_group import over
from ..ddp_core.transport.rank_messages import exchange

logger = logging.getLogger(__name__)
COMPRESSOR = "GRADWIRE_COMPRESSOR"  # the compressor that the script is to use
FOLDER, STEPS = "GRADWIRE_TRY_FOLDER", "GRADWIRE_TRY_STEPS"  # for the files of ranks; the steps until the script ends
SENT = ("sent_bytes", "ratio")  # of the measurements of a step
PLACE = "place.json"  # the file that says how many hosts there were, and whether ranks trained on CPUs


class _Steps:
    """The file of one rank, with a line per step. After the last one each host has the files of all ranks."""

    def __init__(self, folder: str, steps: int) -> None:
        self._folder, self._left, self._lines = Path(folder), steps, list[str]()
        self._file = self._path(dist.get_rank()).open("w", buffering=1, encoding="utf-8")

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05}.jsonl"

    def add(self, loss: float | Tensor, handle: Observed | None) -> None:
        """Write a step; after the last one, end the script."""
        measured = {} if handle is None else handle.metrics()
        sent = {name: value for name, value in measured.items() if name in SENT}
        number = loss.item() if isinstance(loss, Tensor) else loss
        self._lines.append(json.dumps({"loss": number, "at": time.perf_counter(), **sent}) + "\n")
        self._file.write(self._lines[-1])
        self._left -= 1
        if not self._left:
            self._file.close()
            self._share(on_cpus=not (loss.is_cuda if isinstance(loss, Tensor) else torch.cuda.is_available()))
            raise SystemExit(0)

    def _share(self, *, on_cpus: bool) -> None:
        """Have the lines of all ranks on each host, so that all print the same."""
        assert dist.group.WORLD is not None
        try:
            own = json.dumps([host_name(), "".join(self._lines)])
            told = [json.loads(text) for text in exchange(own, over(dist.group.WORLD), what="losses of their steps")]
        except Exception as error:  # these lines are written already
            logger.warning("gradwire try shows the ranks of this host alone, since others did not answer: %s", error)
            return
        for rank, (_, lines) in enumerate(told):
            self._write(self._path(rank), lines)
        place = {"hosts": len({host for host, _ in told}), "on_cpus": on_cpus}
        self._write(self._folder / PLACE, json.dumps(place))

    def _write(self, path: Path, text: str) -> None:
        """Write a file at once: all ranks of a host write the same one."""
        new = path.with_suffix(f".{dist.get_rank()}")
        new.write_text(text, "utf-8")
        new.replace(path)


_steps = cache(_Steps)


def report_loss(loss: float | Tensor, handle: Observed | None = None) -> None:
    """Report the training loss of a step to `gradwire try`. Without that command, do nothing.

    Call it on all ranks, once per step, behind `optimizer.step()`. After the steps that `gradwire try` asks for, the call
    tells all ranks the losses of all, over the default process group, and ends the script by SystemExit.

    Args:
        loss: this rank's loss of the step. A tensor on a GPU is waited for.
        handle: what `attach` returned, or `model.compression` of gradwire's DistributedDataParallel. Without one, the
            bytes stay unknown.
    """
    folder = os.environ.get(FOLDER)
    if folder is not None:
        _steps(folder, int(os.environ[STEPS])).add(loss, handle)
