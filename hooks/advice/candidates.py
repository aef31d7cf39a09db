"""The compressors to choose from, and the expected loss of each, from the decision table."""

from __future__ import annotations

from collections.abc import Sequence

from ...compress.builder.optimizers import Optimizers, kinds
from .decisions import ADAMW, CANDIDATES, MUON, SGD, Candidate

UNCOMPRESSED = ("none", "bf16")  # what a user gets without giving anything up
PRIORITY, BACKWARD = "priority", "backward"
TWO_LEVELS = "hosts+"


def family(optimizer: Optimizers) -> str:
    """Return the optimizer of the decision table that is most like this one, or these."""
    found = kinds(optimizer)
    if "Muon" in found:
        return MUON
    return ADAMW if found == {"Adam"} else SGD


def candidates(specs: Sequence[str] | None) -> list[Candidate]:
    """Return the candidates of some compressors, "none" always among them; all of the table if none are given.

    A two-level compressor loses what its inner one does.
    """
    known = {each.spec: each for each in CANDIDATES}
    if specs is None:
        return list(CANDIDATES)
    return [known.get(spec, Candidate(spec, {})) for spec in dict.fromkeys(["none", *specs])]
