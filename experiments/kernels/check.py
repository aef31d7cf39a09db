"""Comparison of a backend's results with the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels import backends, use_backend
from ...kernels.dispatch import REFERENCE, Operation
from .cases import Case
from .heavy_tail import HeavyTail
from .job import Job, Output

SUM_TOLERANCE = 1e-4  # of float32 sums in another order, relative to a number and to the root mean square of all
PIECE = 2**22  # elements compared at a time
SEED = 1


@dataclass(frozen=True)
class Checked:
    """`wrong`: what differs from the reference, empty where nothing does. `by_others`: of operations that the backend does
    not have, or not for this dtype, the backend that ran."""

    wrong: str
    by_others: Mapping[str, str]


def outcome(job: Job, numbers: HeavyTail, *backends: str) -> list[Output]:
    """The job's results, on data that are always the same; in the job's own buffers, which the next run overwrites."""
    numbers.restart(SEED)
    job.refill(numbers)
    with use_backend(*backends):
        job.run()
        return job.results()


def kept(results: list[Output]) -> list[Output]:
    """A copy of results."""
    return [replace(each, values=each.values.clone()) for each in results]


def check(case: Case, job: Job, numbers: HeavyTail, backend: str, expected: list[Output]) -> Checked:
    """Compare a backend with what the reference gave, which is right. What it raises is a result too."""
    if backend == REFERENCE:
        return Checked("", {})
    device = job.inputs[0].device.type
    requested = first(backend, device)
    with use_backend(*requested):
        ran = {each.name: each.chosen(device) for each in case.operations}
    with noting_others(case.operations) as others:
        try:
            found = outcome(job, numbers, *requested)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a backend may raise what it likes: it is shown in its row
            return Checked(f"{type(error).__name__}: {error}", {})
    wrong = filter(None, map(difference, expected, found))
    by_others = {name: other for name, other in (ran | others).items() if other != backend}
    return Checked("; ".join(wrong), by_others)


def first(backend: str, device: str) -> tuple[str, ...]:
    """The backend, and for what it does not have, those that would run without a request."""
    if backend == REFERENCE:
        return (REFERENCE,)
    others = [each.name for each in backends() if each.automatic and each.device == device and each.available]
    return tuple(dict.fromkeys((backend, *others, REFERENCE)))


@contextmanager
def noting_others(operations: Iterable[Operation[Any, Any]]) -> Iterator[dict[str, str]]:
    """{operation: the backend that runs what its own leaves to it, such as a dtype} of the calls inside the `with`."""
    ran: dict[str, str] = {}
    references = {each: each.reference for each in operations}
    for each, reference in references.items():
        each.reference = partial(_noted, ran, each.name, reference)
        each.after = partial(_passed_on, ran, each)  # type: ignore[method-assign]
    try:
        yield ran
    finally:
        for each, reference in references.items():
            each.reference = reference
            del each.after


def _noted(ran: dict[str, str], name: str, reference: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    ran[name] = REFERENCE
    return reference(*args, **kwargs)


def _passed_on(ran: dict[str, str], operation: Operation[Any, Any], backend: str, device: str) -> str:
    ran[operation.name] = Operation.after(operation, backend, device)
    return ran[operation.name]


def difference(expected: Output, found: Output) -> str:
    """Return the difference of a result in words; empty if it is right."""
    wanted, got = expected.values.reshape(-1), found.values.reshape(-1)
    size = 0.0 if found.exact else float(wanted.norm(dtype=torch.float32)) / max(1, wanted.numel()) ** 0.5
    start = 0
    for right, piece in zip(wanted.split(PIECE), got.split(PIECE), strict=True):
        off = right != piece if found.exact else _beyond_rounding(right, piece, size)
        if off.any():
            where = int(off.int().argmax())
            values = f"{piece[where].item()} for {right[where].item()}"
            return f"{found.name}: the first of {int(off.sum()):,} differences is at {start + where:,}, {values}"
        start += len(piece)
    return ""


def _beyond_rounding(wanted: Tensor, got: Tensor, size: float) -> Tensor:
    """Mark numbers that differ by more than sums in another order may; `size`: the root mean square of all numbers."""
    tolerance = max(SUM_TOLERANCE, torch.finfo(got.dtype).eps)
    allowed = wanted.abs().float().add_(size).mul_(tolerance)
    return ~((got.float() - wanted.float()).abs() <= allowed)  # what is NaN is off
