"""A user's own training: the model, the batch and the loss that a function of a file returns."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

IN_FILE = ".py:"  # between the file and the function


def own_file(place: str) -> Path:
    """Return the file of FILE.py:FUNCTION. Raises ValueError if there is none."""
    path = Path(place.rpartition(":")[0])
    if not path.is_file():
        raise ValueError(f"there is no file {path} here; a model of your own is FILE.py:FUNCTION, got {place}")
    return path


def own_training(place: str) -> tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]:
    """Return the model, the batch and the loss of FILE.py:FUNCTION, on the CPU; every rank calls it with one seed.

    Raises ValueError for another result.
    """
    path, function = own_file(place), place.rpartition(":")[2]
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(0)
        found = runpy.run_path(str(path)).get(function)
        if not callable(found):
            raise ValueError(f"{path} has no function {function}, which returns model, batch, loss")
        returned = found()
    if not (isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[0], nn.Module)):
        raise ValueError(f"{place} returns a module, a batch and a function loss(model, batch); got {returned!r:.200}")
    model, batch, loss = returned
    return model, batch, loss


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all of its tensors on a device."""
    return tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, batch)
