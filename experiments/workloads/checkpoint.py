"""The file of a training that has not ended, which the same training continues from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


class Checkpoint:
    """A file in a folder, whose name comes from all that decides the result of the training."""

    def __init__(self, folder: str, identity: Mapping[str, Any]) -> None:
        text = json.dumps(identity, sort_keys=True, default=str)
        self.path = Path(folder).expanduser() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.pt"

    def read(self) -> dict[str, Any] | None:
        """Return what `write` wrote last; None if there is no file."""
        return torch.load(self.path) if self.path.exists() else None

    def write(self, state: Mapping[str, Any]) -> None:
        """Write a state, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(".part")
        torch.save(dict(state), written)
        written.replace(self.path)

    def delete(self) -> None:
        """Delete the file, if there is one: the training has ended."""
        self.path.unlink(missing_ok=True)
