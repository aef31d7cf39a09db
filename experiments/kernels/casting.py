"""Jobs that change the number format of a bucket, fill it, or look for numbers that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import kernels
from .job import Job, Output

GRADIENT = 2**18  # elements of one of many gradients
SHARE = 0.25  # the scale of a cast before the sum of four ranks


def narrow(elements: int, dtype: torch.dtype, device: torch.device, to: torch.dtype) -> Job:
    """A bucket to 16 bits, scaled, as the wrappers fp16 and bf16 send; torch's hooks, without their allocation."""
    source = torch.zeros(elements, dtype=dtype, device=device)
    out = torch.zeros(elements, dtype=to, device=device)
    return Job(
        "copy_, mul_",
        [source],
        [out],
        source.nbytes + out.nbytes,
        run=lambda: kernels.cast_scaled(source, out, SHARE),
        run_baseline=lambda: out.copy_(source).mul_(SHARE),
        results=lambda: [Output("out", out, exact=True)],
    )


def widen(elements: int, dtype: torch.dtype, device: torch.device, source: torch.dtype) -> Job:
    """Received 16 bits to the dtype of the bucket, as in the wrappers fp16 and bf16 and in torch's hooks."""
    received = torch.zeros(elements, dtype=source, device=device)
    out = torch.zeros(elements, dtype=dtype, device=device)
    return Job(
        "copy_",
        [received],
        [out],
        received.nbytes + out.nbytes,
        run=lambda: kernels.cast_scaled(received, out, 1.0),
        run_baseline=lambda: out.copy_(received),
        results=lambda: [Output("out", out, exact=True)],
    )


def gather(elements: int, dtype: torch.dtype, device: torch.device) -> Job:
    """Gradients, one after another in a bucket, scaled, as either DistributedDataParallel fills one."""
    pieces = torch.zeros(elements, dtype=dtype, device=device).split(GRADIENT)
    grads = [torch.zeros_like(piece) for piece in pieces]
    out = torch.zeros(elements, dtype=dtype, device=device)

    def run_baseline() -> None:
        for grad, place in zip(grads, out.split(GRADIENT), strict=True):
            torch.mul(grad, SHARE, out=place)

    return Job(
        "mul(out=) for each",
        grads,
        [out],
        2 * out.nbytes,
        run=lambda: kernels.gather_scaled(out, grads, range(0, out.numel(), GRADIENT), SHARE),
        run_baseline=run_baseline,
        results=lambda: [Output("out", out, exact=True)],
    )


def all_finite(elements: int, dtype: torch.dtype, device: torch.device) -> Job:
    """The check of every step with error feedback that all numbers of a bucket are finite.

    The baseline is fast, although a sum of finite numbers may overflow; `isfinite().all()` takes ten times as long.
    """
    grad, answers = torch.zeros(elements, dtype=dtype, device=device), list[Tensor]()

    def results() -> list[Output]:
        """The last answer, and that to the same bucket with one infinite number."""
        grad[grad.numel() // 3] = torch.inf
        return [Output("answers", torch.stack([answers[-1], kernels.all_finite(grad)]), exact=True)]

    return Job(
        "sum().isfinite()",
        [grad],
        [],
        grad.nbytes,
        run=lambda: answers.append(kernels.all_finite(grad)),
        run_baseline=lambda: answers.append(grad.sum(dtype=torch.float32).isfinite()),
        results=results,
        prepare=lambda numbers: answers.clear(),
    )
