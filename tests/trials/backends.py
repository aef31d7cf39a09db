"""Trials of ranks with different kernel backends: they end with the same parameters, or are refused."""

from dataclasses import dataclass
from random import Random

import torch

from gradwire.compress import Ranks, compressor
from gradwire.compress.simulate import operations_of
from gradwire.kernels import operations, orthogonalize

from ..ddp_core.averaging.test_same_kernels import kernels_of, trained

SPECS = (
    "powersgd:rank=2,min_compression_rate=0.1",
    "onebit",
    "int4:rotate=true",
    "acp-powersgd:rank=1",
    "topk",
    "none",
)
WITH, WITHOUT = (None, "native"), ("lacking native", "reference")  # whose backends differ
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
    source = Random(f"backends {seed}")
    kernels = [source.choice(WITH), source.choice(WITHOUT)]
    kernels += [source.choice((None, *WITH, *WITHOUT)) for _ in range(source.choice((0, 0, 1)))]
    source.shuffle(kernels)
    return Trial(seed, source.choice(SPECS), source.choice(("own", "attach")), tuple(kernels))


def reference_for(trial):
    """The operation that all ranks run on the reference, as a rank has no other backend: it shows the difference."""
    used = operations_of(compressor(trial.spec), torch.float32, Ranks(len(trial.kernels)))
    return orthogonalize.name if orthogonalize.name in used else None


def train(rank, world_size, trial):
    """As `trained`, and the backend that this rank runs without the others."""
    with kernels_of(trial.kernels[rank]):
        alone = operations()[orthogonalize.name].chosen("cpu")
    return *trained(rank, world_size, trial.kernels, trial.spec, trial.api), alone


def undergone(pool, trial, scale):
    answers = pool.run(train, len(trial.kernels), trial, timeout=2 * SECONDS * scale, expect_errors=True)
    if trial.refused:  # in words that name backends that differ
        said = [getattr(answer, "message", "") for answer in answers]
        return [f"rank {r} was not refused" for r, text in enumerate(said) if "no kernel backend for" not in text], []
    failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if not isinstance(answer, tuple)]
    if failed:
        return failed, []
    first = answers[0][0]
    worst = reference_for(trial)
    wrong = [f"rank {r} runs {worst} on {ran}" for r, (*_, ran, _) in enumerate(answers) if ran != "reference"]
    apart = [r for r, (mine, *_) in enumerate(answers) if not all(map(torch.equal, mine, first))]
    found = [f"rank {rank} ends with other parameters than rank 0" for rank in apart]
    if len({alone for *_, alone in answers}) == 1:
        found.append("the ranks' backends do not differ")
    return [*found, *(wrong if worst else [])], []
