"""Trials of ranks with different kernel backends: they end with the same parameters, or are refused."""

from dataclasses import dataclass
from random import Random

import torch

from gradwire.compress import Ranks, compressor
from gradwire.compress.simulate import operations_of
from gradwire.kernels import backends, orthogonalize

from ..ddp_core.averaging.test_same_kernels import trained

SPECS = (
    "powersgd:rank=2,min_compression_rate=0.1",
    "onebit",
    "int4:rotate=true",
    "acp-powersgd:rank=1",
    "topk",
    "none",
)
KERNELS = (None, None, "lacking native", "reference", "native")
SECONDS = 60


@dataclass(frozen=True)
class Trial:
    """`kernels`: of each rank, see `kernels_of`. `api`: our own DDP, or torch's with our hook."""

    seed: int
    spec: str
    api: str
    kernels: tuple[str | None, ...]

    @property
    def refused(self):
        """Whether one requests what another lacks, or requested another one than."""
        asked = {each for each in self.kernels if each in ("reference", "native")}
        return self.spec != "none" and (len(asked) > 1 or (asked == {"native"} and "lacking native" in self.kernels))


def drawn(seed):
    """The trial of a seed."""
    source = Random(f"backends {seed}")
    available = {each.name for each in backends() if each.available}
    known = [each for each in KERNELS if each in (None, "reference") or "native" in available]
    kernels = tuple(source.choice(known) for _ in range(source.choice((2, 2, 3))))
    return Trial(seed, source.choice(SPECS), source.choice(("own", "attach")), kernels)


def reference_for(trial):
    """The operation that all ranks run on the reference, as a rank has no other backend: it shows the difference."""
    name = orthogonalize.name
    without = any(each in ("lacking native", "reference") for each in trial.kernels)
    used = name in operations_of(compressor(trial.spec), torch.float32, Ranks(len(trial.kernels)))
    return name if without and used else None


def undergone(pool, trial, scale):
    """Sentences on laws that do not hold."""
    given = trial.kernels, trial.spec, trial.api
    answers = pool.run(trained, len(trial.kernels), *given, timeout=2 * SECONDS * scale, expect_errors=True)
    if trial.refused:
        said = [getattr(answer, "message", "") for answer in answers]
        return [f"rank {r} was not refused" for r, text in enumerate(said) if "no kernel backend for" not in text], []
    failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if not isinstance(answer, tuple)]
    if failed:
        return failed, []
    first = answers[0][0]
    worst = reference_for(trial)
    wrong = [f"rank {r} runs {worst} on {chosen}" for r, (*_, chosen) in enumerate(answers) if chosen != "reference"]
    apart = [r for r, (mine, _, _) in enumerate(answers) if not all(map(torch.equal, mine, first))]
    differing = [f"rank {rank} ends with other parameters than rank 0" for rank in apart]
    return [*differing, *(wrong if worst else [])], []
