"""One trial on a pool of ranks, and what came of it."""

from dataclasses import dataclass, field
from typing import Any

from . import known
from .kinds import KINDS


@dataclass(frozen=True)
class Outcome:
    """`name`: what `make fuzz SEED=` takes. `found`: laws that do not hold. `vague`: messages that do not say where."""

    name: str
    trial: Any
    found: list[str]
    vague: list[str] = field(default_factory=list)

    def report(self, *, whole=False):
        """Nothing for a trial that holds, else a line to run it again with, and what was found."""
        lines = [f"  vague: {message}" for message in dict.fromkeys(self.vague)]
        if self.found:
            lines += [f"  {sentence}" for sentence in (self.found if whole else self.found[:3])]
        if whole:
            lines.append(f"  {self.trial}")
        again = f"make fuzz SEED={self.name}"
        return "\n".join([f"{'FAILED ' if self.found else ''}{again}", *lines, ""]) if lines else ""


def outcome(pool, seed, scale=1.0, faults="some", *, kind="ddp", all_the_same=False):
    """Run the trial of a seed; None where its kind is not wanted, or known to fail. `all_the_same`: run that, too."""
    trial = KINDS[kind].drawn(seed)
    if not all_the_same and known.why(trial):
        return None
    if faults != "some" and (getattr(trial, "mishap", None) is not None) != (faults == "only"):
        return None
    name = str(seed) if kind == "ddp" else f"{kind}-{seed}"
    return Outcome(name, trial, *KINDS[kind].undergone(pool, trial, scale))
