"""The report of each site before a round, in whole numbers, which a tensor carries exactly; the record of a finished one."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..internet.late_sites import Claim
from ..internet.meeting import bytes_of

DIGEST = 1 << 62  # digests and identities are below it, so that they fit a tensor's numbers
PART = 1 << 20  # elements
REALS = 4  # numbers of a report whose bits travel: norm, owed, weight, drift
BITS = struct.Struct(f"<{REALS}d"), struct.Struct(f"<{REALS}q")


@dataclass(frozen=True)
class SiteReport:
    """A site before a round. `claim`: its standing; `able`: its difference is finite; `norm`: of the difference.

    `weight`: of it in the average. `owed`: the norm of what its compressor holds back, which joins the average.
    `drift`: the norm of the change of its buffers.
    `drawn`: a random number, of which the first site's is the identity of a new training. `lineage`: alike at sites whose
    models are. `flags`: of the parameters that were frozen at the start.
    """

    claim: Claim
    able: bool
    drawn: int
    norm: float
    owed: float
    weight: float
    drift: float
    lineage: int
    flags: list[int]

    @classmethod
    def of(cls, row: Sequence[int]) -> SiteReport:
        """Return what these numbers say."""
        number, able, training, drawn, *told, lineage = row[: 4 + REALS + 1]
        norm, owed, weight, drift = BITS[0].unpack(BITS[1].pack(*told))
        able = bool(able) and is_weight(weight) and all(0 <= each < math.inf for each in (norm, owed, drift))
        rest = list(row[4 + REALS + 1 :])
        claim = Claim(identity(training) if number > 0 else "", number)
        return cls(claim, able, drawn, norm, owed, weight, drift, lineage, rest)

    @property
    def row(self) -> list[int]:
        """The numbers that other sites get."""
        training = int(self.claim.training or "0", 16)
        told = BITS[1].unpack(BITS[0].pack(self.norm, self.owed, self.weight, self.drift))
        return [self.claim.round, self.able, training, self.drawn, *told, self.lineage, *self.flags]


@dataclass(frozen=True)
class RoundStats:
    """A finished round. `fragment`: its number; `seconds` it took beside training; `sites`: that took part.

    `payload_bytes` that this site gave to collectives, `sent_bytes` that left it: as counted between sites that meet, in
    ring collectives of a process group. `replaced`: this site took the others' model over, as it was late, or its
    difference was not finite or left out. `outliers`: the names of sites whose differences or buffers were clipped
    or left out.
    """

    round: int
    fragment: int
    sites: int
    seconds: float
    payload_bytes: int
    sent_bytes: float
    replaced: bool
    outliers: tuple[str, ...] = ()


def identity(number: int) -> str:
    """Return the identity of a training whose number is given."""
    return f"{number:016x}"


def is_weight(weight: object) -> bool:
    """Return True for the weight of a site: a finite number above 0."""
    return isinstance(weight, int | float) and 0 < weight < math.inf


def norm_of(numbers: Tensor) -> float:
    """Return the norm in 64 bits, part by part: torch would copy all numbers in 64 bits."""
    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in numbers.split(PART)))


def digest_of(tensors: Sequence[Tensor]) -> int:
    """Return a digest of these tensors' bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(bytes_of(tensor))
    return int.from_bytes(found.digest()[:8], "big") % DIGEST
