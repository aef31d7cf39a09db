"""One trial on a pool of ranks, and what came of it."""

from dataclasses import dataclass, field

from ..ranks import RankError
from . import fates, known, laws
from .draw import Trial, drawn
from .rank import train

SECONDS = 60


@dataclass(frozen=True)
class Outcome:
    """`found`: laws that do not hold. `vague`: messages that do not say where."""

    trial: Trial
    found: list[str]
    vague: list[str] = field(default_factory=list)

    def report(self, *, whole=False):
        """Nothing for a trial that holds, else a line to run it again with, and what was found."""
        lines = [f"  vague: {message}" for message in dict.fromkeys(self.vague)]
        if self.found:
            lines += [f"  {sentence}" for sentence in (self.found if whole else self.found[:3])]
        if whole:
            lines.append(f"  {self.trial}")
        return "\n".join([f"{'FAILED ' if self.found else ''}{self.trial.again}", *lines, ""]) if lines else ""


def outcome(pool, seed, scale=1.0, faults="some", *, all_the_same=False):
    """Run the trial of a seed; None where its kind is not wanted, or known to fail. `all_the_same`: run that, too."""
    trial = drawn(seed)
    if not all_the_same and known.why(trial):
        return None
    if faults != "some" and (trial.mishap is not None) != (faults == "only"):
        return None
    if trial.mishap is not None:
        answers = pool.run(fates.undergo, trial.world_size, trial, timeout=2 * SECONDS * scale, expect_errors=True)
        return Outcome(trial, *fates.broken(trial, answers, scale))
    try:
        answers = pool.run(train, trial.world_size, trial, timeout=SECONDS * scale)
    except RankError as error:
        return Outcome(trial, [str(error)])
    return Outcome(trial, laws.broken(trial, answers))
