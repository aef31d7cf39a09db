"""The numbers that each site tells the others before a round: whole ones, which a tensor carries exactly."""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import all_finite
from .fragment import Fragment
from .joining import flags
from .outliers import factors, shares
from .standing import Claim

DIGEST = 1 << 62  # digests and identities are below it, so that they fit a tensor's numbers
PART = 1 << 20  # elements
BITS = struct.Struct("<d"), struct.Struct("<q")


@dataclass(frozen=True)
class Report:
    """A site before a round. `able`: its difference is finite; `norm`: of the difference; `weight`: of it in the average.

    `drawn`: a random number, of which the first site's is the identity of a new training. `lineage`: alike at sites whose
    models are. `flags`: of the parameters that were frozen at the start.
    """

    round: int
    able: bool
    training: str
    drawn: int
    norm: float
    weight: float
    lineage: int
    flags: list[int]

    @classmethod
    def now(
        cls,
        claim: Claim,
        lineage: int,
        difference: Tensor | None,
        weight: float,
        fragments: Sequence[Fragment],
        unfrozen: Mapping[str, Tensor],
    ) -> Report:
        """Return this site's."""
        norm = 0.0 if difference is None else _norm(difference)
        able = difference is not None and bool(all_finite(difference))
        drawn = secrets.randbelow(DIGEST)
        return cls(claim.round, able, claim.training, drawn, norm, weight, lineage, flags(fragments, unfrozen))

    @classmethod
    def of(cls, row: Sequence[int]) -> Report:
        """Return what these numbers say."""
        number, able, training, drawn, norm, weight, lineage, *rest = row
        real = _real(weight)
        able = bool(able) and is_weight(real)
        return cls(number, able, identity(training), drawn, _real(norm), real, lineage, rest)

    @property
    def row(self) -> list[int]:
        """The numbers that other sites get."""
        training = int(self.training or "0", 16)
        head = [self.round, self.able, training, self.drawn, _whole(self.norm), _whole(self.weight), self.lineage]
        return [*head, *self.flags]


def identity(number: int) -> str:
    """Return the identity of a training whose number is given."""
    return f"{number:016x}"


def is_weight(weight: object) -> bool:
    """Return True for the weight of a site: a finite number above 0."""
    return isinstance(weight, int | float) and 0 < weight < math.inf


def shares_of(reports: Sequence[Report], counted: Sequence[bool], outliers: str) -> tuple[list[float], list[float]]:
    """Return factors of the sites' differences: their shares in the mean over all sites, and those that clip differences.

    The share of a site that does not count is 0, and those of the others are larger for it. Residuals have no share: the
    mean over all sites brings out what they all hold back.
    """
    here = [place for place, counts in enumerate(counted) if counts]
    clipped = dict(zip(here, factors([reports[place].norm for place in here], outliers), strict=True))
    kept = [place for place in here if clipped[place] > 0]
    weighed = dict(zip(kept, shares([reports[place].weight for place in kept]), strict=True))
    places, of_all = range(len(reports)), len(reports) / max(1, len(kept))
    return [of_all * weighed.get(place, 0.0) for place in places], [clipped.get(place, 1.0) for place in places]


def _norm(numbers: Tensor) -> float:
    """Return the norm in 64 bits, part by part: torch would copy all numbers in 64 bits."""
    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in numbers.split(PART)))


def _whole(number: float) -> int:
    real, whole = BITS
    return int(whole.unpack(real.pack(number))[0])


def _real(number: int) -> float:
    real, whole = BITS
    return float(real.unpack(whole.pack(number))[0])
