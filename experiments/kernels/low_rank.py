"""Jobs of PowerSGD: a step's arithmetic on the matrices of a bucket, whole and by its parts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle

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


class LowRank:
    """Buffers of a bucket of matrices, and what is done to them by either way.

    Torch's PowerSGD keeps P and Q row by row, so that its baseline has factors of its own.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        self.factors = transformer_matrices(elements, rank)
        last = self.factors.matrices[-1]
        self.grad, self.residual = inputs(last.offset + last.rows * last.columns, dtype, device)
        self.p = torch.zeros(self.factors.left_offsets[-1], device=device)
        self.q = torch.zeros(self.factors.right_offsets[-1], device=device)
        self.first_p, self.first_q = self.p.clone(), self.q.clone()
        self.torch_p = [torch.zeros(m.rows, rank, device=device) for m in self.factors.matrices]
        self.torch_q = [torch.zeros(m.columns, rank, device=device) for m in self.factors.matrices]

    def keep_first(self, numbers: HeavyTail) -> None:
        """Keep P and Q as they are before a run, for the baseline too."""
        self.first_p.copy_(self.p)
        self.first_q.copy_(self.q)
        for ours, theirs in ((self.factors.left(self.p), self.torch_p), (self.factors.right(self.q), self.torch_q)):
            torch._foreach_copy_(theirs, [each.T for each in ours])

    def left(self) -> None:
        """`M = grad + residual` and `P = M Q`, as powersgd before its first all-reduce."""
        kernels.low_rank_left(self.grad, Residual(self.residual, self.residual), self.factors, self.q, self.p)

    def orthogonalize(self) -> None:
        """Orthonormal columns in place of P."""
        kernels.orthogonalize(self.p, self.factors)

    def right(self) -> None:
        """`Q = M^T P`, as powersgd before its second all-reduce."""
        kernels.low_rank_right(self.residual, self.factors, self.p, self.q)

    def finish(self) -> None:
        """`P Q^T` into the gradient, and what it misses of M into the residual."""
        kernels.low_rank_finish(self.grad, self.residual, self.factors, self.p, self.q)

    def normalize(self) -> None:
        """Columns of Q to length 1, as powersgd at the end of a step."""
        kernels.normalize(self.q, self.factors, self.first_q)

    def whole(self) -> None:
        """Run a step of powersgd, without its all-reduces."""
        for part in (self.left, self.orthogonalize, self.right, self.finish, self.normalize):
            part()

    def torch_left(self) -> None:
        """Two passes."""
        self.residual.add_(self.grad)
        products(self.factors.full(self.residual), self.torch_q, self.torch_p)

    def torch_orthogonalize(self) -> None:
        """Do as torch's hook: one call for each matrix, and no factorization for a single column."""
        for p in self.torch_p:
            p.copy_(torch.linalg.qr(p).Q if p.shape[1] > 1 else p / p.norm())

    def torch_right(self) -> None:
        """One pass."""
        products([m.T for m in self.factors.full(self.residual)], self.torch_p, self.torch_q)

    def torch_finish(self) -> None:
        """Two passes."""
        products(self.torch_p, [q.T for q in self.torch_q], self.factors.full(self.grad))
        self.residual.sub_(self.grad)

    def torch_normalize(self) -> None:
        """Without a thought for zeros."""
        for q in self.torch_q:
            q.div_(q.norm(dim=0))

    def torch_whole(self) -> None:
        """Do as torch's hook, which moves 44 bytes per element."""
        before, matrices = self.grad.add_(self.residual).clone(), list(self.factors.full(self.grad))
        products(matrices, self.torch_q, self.torch_p)
        self.torch_orthogonalize()
        products([m.T for m in matrices], self.torch_p, self.torch_q)
        products(self.torch_p, [q.T for q in self.torch_q], matrices)
        torch.sub(before, self.grad, out=self.residual)


def products(lefts: Iterable[Tensor], rights: Iterable[Tensor], outs: Iterable[Tensor]) -> None:
    """One product of matrices after another, by torch."""
    for first, second, out in zip(lefts, rights, outs, strict=True):
        torch.mm(first, second, out=out)


def left(elements: int, dtype: torch.dtype, device: torch.device, rank: int) -> Job:
    """Gradient and residual in, M out; M exactly, P up to the rounding of sums."""
    b = LowRank(elements, dtype, device, rank)
    floor = b.grad.nbytes + 2 * b.residual.nbytes
    results = [Output("residual", b.residual, exact=True), Output("p", b.p)]
    reads = [b.grad, b.residual, b.q]
    return Job("add_, mm", reads, [b.p], floor, b.left, b.torch_left, lambda: results, b.keep_first)


def right(elements: int, dtype: torch.dtype, device: torch.device, rank: int) -> Job:
    """M in; Q up to the rounding of sums."""
    b = LowRank(elements, dtype, device, rank)
    baseline, floor, results = "mm of the transposed matrix", b.residual.nbytes, [Output("q", b.q)]
    return Job(baseline, [b.residual, b.p], [b.q], floor, b.right, b.torch_right, lambda: results, b.keep_first)


def finish(elements: int, dtype: torch.dtype, device: torch.device, rank: int) -> Job:
    """M in, gradient and residual out; both up to the rounding of sums."""
    b = LowRank(elements, dtype, device, rank)
    floor = b.grad.nbytes + 2 * b.residual.nbytes
    results = [Output("grad", b.grad), Output("residual", b.residual)]
    reads = [b.residual, b.p, b.q]
    return Job("mm, sub_", reads, [b.grad], floor, b.finish, b.torch_finish, lambda: results, b.keep_first)


def orthogonalize(elements: int, dtype: torch.dtype, device: torch.device, rank: int) -> Job:
    """P in and out; not the basis, which may differ in signs, but its lengths, its angles, and what it keeps of P."""
    b = LowRank(elements, dtype, device, rank)

    def results() -> list[Output]:
        bases, given = list(b.factors.left(b.p)), list(b.factors.left(b.first_p))
        squares = torch.stack([basis @ basis.T for basis in bases])
        kept = torch.cat([(g @ basis.T @ basis).view(-1) for basis, g in zip(bases, given, strict=True)])
        return [Output("basis times its transpose", squares), Output("projection", kept)]

    baseline, floor = "linalg.qr of each matrix", 2 * b.p.nbytes
    return Job(baseline, [b.p], [], floor, b.orthogonalize, b.torch_orthogonalize, results, b.keep_first)


def normalize(elements: int, dtype: torch.dtype, device: torch.device, rank: int) -> Job:
    """Q in and out, up to rounding."""
    b = LowRank(elements, dtype, device, rank)
    baseline, floor, results = "norm, div_ of each matrix", 2 * b.q.nbytes, [Output("q", b.q)]
    return Job(baseline, [b.q], [], floor, b.normalize, b.torch_normalize, lambda: results, b.keep_first)


def powersgd_round(elements: int, dtype: torch.dtype, device: torch.device, rank: int) -> Job:
    """All arithmetic of a step with error feedback, as on one rank.

    Gradient and residual in, M out; M in; M in, gradient and residual out. Of Q, whose columns may differ in signs, the
    lengths.
    """
    b = LowRank(elements, dtype, device, rank)

    def results() -> list[Output]:
        lengths = torch.cat([q.norm(dim=1) for q in b.factors.right(b.q)])
        return [Output("grad", b.grad), Output("residual", b.residual), Output("lengths of q", lengths)]

    baseline = "torch's hook: add_, clone, mm, linalg.qr, mm, mm, sub"
    reads, floor = [b.grad, b.residual, b.q], 2 * b.grad.nbytes + 5 * b.residual.nbytes
    return Job(baseline, reads, [b.p], floor, b.whole, b.torch_whole, results, b.keep_first)
