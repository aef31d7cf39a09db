"""Jobs of PowerSGD on factors alone."""

from __future__ import annotations

import torch

from ... import kernels
from .job import Output
from .low_rank import LowRank


class Orthogonalize(LowRank):
    """Orthonormal columns in place of P."""

    baseline = "linalg.qr of each matrix"
    reads = ("p",)

    @property
    def floor_bytes(self) -> float:
        """P in and out."""
        return 2 * self.p.nbytes

    def run(self) -> None:
        """As powersgd between its all-reduces."""
        kernels.orthogonalize(self.p, self.factors)

    def run_baseline(self) -> None:
        """As torch's hook."""
        self.torch_orthogonalize()

    def results(self) -> list[Output]:
        """Not the basis, which may differ in signs, but its lengths, its angles, and what it keeps of P."""
        bases, given = list(self.factors.left(self.p)), list(self.factors.left(self.first_p))
        products = torch.stack([basis @ basis.T for basis in bases])
        kept = torch.cat([(g @ basis.T @ basis).view(-1) for basis, g in zip(bases, given, strict=True)])
        return [Output("basis times its transpose", products), Output("projection", kept)]


class Normalize(LowRank):
    """Columns of Q to length 1."""

    baseline = "norm, div_ of each matrix"
    reads = ("q",)

    @property
    def floor_bytes(self) -> float:
        """Q in and out."""
        return 2 * self.q.nbytes

    def run(self) -> None:
        """As powersgd at the end of a step."""
        kernels.normalize(self.q, self.factors, self.first_q)

    def run_baseline(self) -> None:
        """Without a thought for zeros."""
        for q in self.torch_q:
            q.div_(q.norm(dim=0))

    def results(self) -> list[Output]:
        """Q up to rounding."""
        return [Output("q", self.q)]
