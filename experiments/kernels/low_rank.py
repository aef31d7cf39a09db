"""Jobs of PowerSGD: a step's arithmetic on the matrices of a bucket, whole and by its parts."""

from __future__ import annotations

from itertools import cycle
from typing import ClassVar

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Factors, Matrix, Residual
from .heavy_tail import HeavyTail
from .job import Job, Output, inputs

WIDTH = 512
LAYERS = (  # (rows, columns) of a transformer's block: attention in and out, perceptron in and out
    (3 * WIDTH, WIDTH),
    (WIDTH, WIDTH),
    (4 * WIDTH, WIDTH),
    (WIDTH, 4 * WIDTH),
)
FEWEST_ROWS = 64
SMALLEST = FEWEST_ROWS * WIDTH  # elements of the smallest bucket


def transformer_matrices(elements: int, rank: int) -> Factors:
    """The matrices of as many blocks as fit into `elements`, the last one cut; fewer than `SMALLEST` are left over."""
    matrices: list[Matrix] = []
    used = 0
    layers = cycle(LAYERS)
    while elements - used >= SMALLEST:
        rows, columns = next(layers)
        rows = min(rows, (elements - used) // columns)
        if rows >= FEWEST_ROWS:
            matrices.append(Matrix(used, rows, columns, rank))
            used += rows * columns
    return Factors(tuple(matrices))


class LowRank(Job):
    """Buffers of a bucket of matrices; `reads` and `writes` name those of a job.

    Torch's PowerSGD keeps P and Q row by row, so that its baseline has factors of its own.
    """

    reads: ClassVar[tuple[str, ...]]
    writes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        self.factors = transformer_matrices(elements, rank)
        last = self.factors.matrices[-1]
        self.grad, self.residual = inputs(last.offset + last.rows * last.columns, dtype, device)
        self.p = torch.zeros(self.factors.left_offsets[-1], device=device)
        self.q = torch.zeros(self.factors.right_offsets[-1], device=device)
        self.first_p, self.first_q = self.p.clone(), self.q.clone()
        self.torch_p = [torch.zeros(m.rows, rank, device=device) for m in self.factors.matrices]
        self.torch_q = [torch.zeros(m.columns, rank, device=device) for m in self.factors.matrices]
        super().__init__(*([getattr(self, name) for name in names] for names in (self.reads, self.writes)))

    def refill(self, numbers: HeavyTail) -> None:
        """The baseline's factors too; what they were is kept."""
        super().refill(numbers)
        self.first_p.copy_(self.p)
        self.first_q.copy_(self.q)
        for ours, theirs in ((self.factors.left(self.p), self.torch_p), (self.factors.right(self.q), self.torch_q)):
            torch._foreach_copy_(theirs, [each.T for each in ours])

    def torch_left(self, matrices: Tensor) -> None:
        """`P = M Q` by torch."""
        for m, q, p in zip(self.factors.full(matrices), self.torch_q, self.torch_p, strict=True):
            torch.mm(m, q, out=p)

    def torch_orthogonalize(self) -> None:
        """As torch's hook: one call for each matrix, and no factorization for a single column."""
        for p in self.torch_p:
            p.copy_(torch.linalg.qr(p).Q if p.shape[1] > 1 else p / p.norm())

    def torch_right(self, matrices: Tensor) -> None:
        """`Q = M^T P` by torch."""
        for m, p, q in zip(self.factors.full(matrices), self.torch_p, self.torch_q, strict=True):
            torch.mm(m.T, p, out=q)

    def torch_product(self) -> None:
        """`P Q^T` into the gradient by torch."""
        for g, p, q in zip(self.factors.full(self.grad), self.torch_p, self.torch_q, strict=True):
            torch.mm(p, q.T, out=g)


class Left(LowRank):
    """`M = grad + residual` and `P = M Q`."""

    baseline = "add_, mm"
    reads = ("grad", "residual", "q")
    writes = ("p",)

    @property
    def floor_bytes(self) -> float:
        """Gradient and residual in, M out."""
        return self.grad.nbytes + 2 * self.residual.nbytes

    def run(self) -> None:
        """As powersgd before its first all-reduce."""
        kernels.low_rank_left(self.grad, Residual(self.residual, self.residual), self.factors, self.q, self.p)

    def run_baseline(self) -> None:
        """Two passes."""
        self.residual.add_(self.grad)
        self.torch_left(self.residual)

    def results(self) -> list[Output]:
        """M exactly, P up to the rounding of sums."""
        return [Output("residual", self.residual, exact=True), Output("p", self.p)]


class Right(LowRank):
    """`Q = M^T P`."""

    baseline = "mm of the transposed matrix"
    reads = ("residual", "p")
    writes = ("q",)

    @property
    def floor_bytes(self) -> float:
        """M in."""
        return self.residual.nbytes

    def run(self) -> None:
        """As powersgd before its second all-reduce."""
        kernels.low_rank_right(self.residual, self.factors, self.p, self.q)

    def run_baseline(self) -> None:
        """One pass."""
        self.torch_right(self.residual)

    def results(self) -> list[Output]:
        """Q up to the rounding of sums."""
        return [Output("q", self.q)]


class Finish(LowRank):
    """`P Q^T` into the gradient, and what it misses of M into the residual."""

    baseline = "mm, sub_"
    reads = ("residual", "p", "q")
    writes = ("grad",)

    @property
    def floor_bytes(self) -> float:
        """M in, gradient and residual out."""
        return self.grad.nbytes + 2 * self.residual.nbytes

    def run(self) -> None:
        """As powersgd after its second all-reduce."""
        kernels.low_rank_finish(self.grad, self.residual, self.factors, self.p, self.q)

    def run_baseline(self) -> None:
        """Two passes."""
        self.torch_product()
        self.residual.sub_(self.grad)

    def results(self) -> list[Output]:
        """Both up to the rounding of sums."""
        return [Output("grad", self.grad), Output("residual", self.residual)]


class PowerSGDRound(LowRank):
    """All arithmetic of a step with error feedback, as on one rank."""

    baseline = "torch's hook: add_, clone, mm, linalg.qr, mm, mm, sub"
    reads = ("grad", "residual", "q")
    writes = ("p",)

    @property
    def floor_bytes(self) -> float:
        """Gradient and residual in, M out; M in; M in, gradient and residual out."""
        return 2 * self.grad.nbytes + 5 * self.residual.nbytes

    def run(self) -> None:
        """As powersgd, without its all-reduces."""
        kernels.low_rank_left(self.grad, Residual(self.residual, self.residual), self.factors, self.q, self.p)
        kernels.orthogonalize(self.p, self.factors)
        kernels.low_rank_right(self.residual, self.factors, self.p, self.q)
        kernels.low_rank_finish(self.grad, self.residual, self.factors, self.p, self.q)
        kernels.normalize(self.q, self.factors, self.first_q)

    def run_baseline(self) -> None:
        """As torch's hook, which moves 44 bytes an element."""
        before = self.grad.add_(self.residual).clone()
        self.torch_left(self.grad)
        self.torch_orthogonalize()
        self.torch_right(self.grad)
        self.torch_product()
        torch.sub(before, self.grad, out=self.residual)

    def results(self) -> list[Output]:
        """Average and residual; of Q, whose columns may differ in signs, the lengths."""
        lengths = torch.cat([q.norm(dim=1) for q in self.factors.right(self.q)])
        return [Output("grad", self.grad), Output("residual", self.residual), Output("lengths of q", lengths)]
