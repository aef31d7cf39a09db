"""The compressors to choose from, and the expected loss of each, from expected_losses.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...compress import compressor
from ...compress.builder.optimizer_defaults import Optimizers, kinds, tuned_specification
from .expected_losses import ADAMW, CANDIDATES, MUON, SGD, SMALL, Candidate

UNCOMPRESSED = ("none", "bf16")  # what a user gets without giving anything up
PRIORITY, BACKWARD = "priority", "backward"
TWO_LEVELS = "hosts+"
NARROW = "residual_bits=8"


def family(optimizer: Optimizers) -> str:
    """Return the optimizer of `CANDIDATES` that is most like this one, or these."""
    found = kinds(optimizer)
    if "Muon" in found:
        return MUON
    return ADAMW if found == {"Adam"} else SGD


def candidates(specs: Sequence[str] | None, optimizer: Optimizers | None = None) -> list[Candidate]:
    """Return the candidates of some compressors, "none" always among them.

    If none are given, those of the table, but for what never ran with the optimizer. Each has the options that `attach`
    fills in for it. A two-level compressor loses what its inner one does.
    """
    known = {tuned_specification(each.spec, optimizer): each for each in CANDIDATES}
    ran = [spec for spec, each in known.items() if optimizer is None or family(optimizer) in each.losses]
    names = ran if specs is None else dict.fromkeys(tuned_specification(spec, optimizer) for spec in ["none", *specs])
    return [replace(known.get(spec, Candidate(spec)), spec=spec) for spec in names]


def narrowed(candidate: Candidate) -> Candidate | None:
    """Return a candidate with its residual in 8 bits; None if it has no residual, or says itself in how many bits.

    It is expected to lose as much: three seeds of int4 show no difference of narrow residuals (0.14 M parameters).
    """
    spec = candidate.spec
    narrow = f"{spec},{NARROW}" if ":" in spec.rpartition("+")[2] else f"{spec}:{NARROW}"
    try:
        compressor(narrow)
    except ValueError:
        return None
    return replace(candidate, spec=narrow, largest={each: SMALL[each] for each in candidate.largest})
