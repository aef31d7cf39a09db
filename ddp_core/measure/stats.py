"""The cost of a model's compression on this rank, and the measurements of the last steps as flat names and numbers.

Bytes are those that `sent_bytes` of compress/protocol/requests.py counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...compress import WarmUp
from ...compress.state.gauge import Sample, stride
from .step import KINDS, BucketStats, Record, Step, link_use, summed

MANY, LATEST = 100, 50  # records that are added up together, and those that are left, which may be under way
RECENT = 8  # steps that are kept as they are
LARGEST = 300.0  # logarithm of a norm whose square is a float
DENSE, SHARDED = 2, 1  # times that dense gradients, or weights, of all other ranks' shares leave a rank


@dataclass(frozen=True)
class Stats:
    """The cost of a model's compression on this rank.

    Attributes:
        steps: the number of synchronized steps, those before a checkpoint included.
        buckets: the buckets of the last synchronized step, in the order sent.
        total: traffic and seconds of all steps since `attach`.
    """

    steps: int
    buckets: tuple[BucketStats, ...]
    total: Record

    @property
    def per_host(self) -> int:
        """Ranks of a host, if any bucket of the last synchronized step traveled in two levels; else 1."""
        return max((bucket.per_host for bucket in self.buckets), default=1)

    @property
    def last(self) -> Record:
        """Traffic and seconds of the last synchronized step, all buckets together."""
        return total(self.buckets)


class Totals:
    """The cost of the steps so far.

    `recent`: the last of them. `watchers`: each `ddp_core.watching.Watch` of the model. When a step begins, their
    `step_begins` is called with it and the number of steps so far, those before a checkpoint counted.
    """

    def __init__(self) -> None:
        self._earlier: list[BucketStats] = []  # and not in the total yet
        self._total = Record()
        self._began = 0.0
        self.recent: deque[Step] = deque(maxlen=RECENT)
        self.watchers: list[Any] = []

    def begin(self, step: Step, ended: int) -> None:
        """A step begins, after `ended` others."""
        before, self._began = self._began, time.perf_counter()
        if not before:  # none has ended here, where others may have before a checkpoint
            return
        step.interval = self._began - before
        for watcher in tuple(self.watchers):
            watcher.step_begins(step, ended)

    def count(self, costs: Iterable[BucketStats], step: Step | None = None) -> None:
        """Count programs, which belong to a step or to none; their cost may still be noted."""
        if step is not None and costs:
            self.recent.append(step)
        if len(self._earlier) > MANY:  # not at every step; nor all records of a training when somebody asks
            self._total, self._earlier = total(self._earlier[:-LATEST], self._total), self._earlier[-LATEST:]
        self._earlier += costs

    def stats(self, step: Step, number: int) -> Stats:
        """Return all statistics. `step`: the last one, which has not been counted; `number`: of steps so far."""
        costs = tuple(step.costs)
        whole = total((*self._earlier, *costs), self._total)
        return Stats(number, costs, whole)

    def close(self) -> None:
        """There will be no more steps."""
        for watcher in tuple(self.watchers):
            watcher.close()

    def recent_and(self, step: Step | None) -> tuple[Step, ...]:
        """The last steps, and one that has not been counted, if it has sent anything."""
        return (*self.recent, step) if step is not None and step.costs else tuple(self.recent)


def total(buckets: Iterable[BucketStats], *before: Record) -> Record:
    """The sum of what buckets cost, and of what was counted before."""
    return summed([*before, *(bucket.record for bucket in buckets)])


@dataclass(frozen=True)
class Measured:
    """The measurements of a model's steps on this rank.

    `steps`: the last ones that came to their end, the newest behind. `begun`: steps since construction. `ranks`: among which
    they average. `on_host`: programs run when the host's clock says so; else, on CUDA, they are queued then, and only the
    seconds of whole steps say anything. `sharded`: buckets are gathers and reductions of shards.
    `warm_up`: the one under way.
    """

    steps: Sequence[Step]
    stats: Stats
    begun: int
    ranks: int
    on_host: bool = True
    sharded: bool = False
    warm_up: WarmUp | None = None


def metrics(measured: Measured, most: int = 1, seen: Step | None = None) -> dict[str, float]:
    """Numbers by flat names: counts since the beginning, and of a step the mean over the last ones, `most` at most.

    A mean is of steps with one compressor: it begins anew after a swap and at the end of a warm-up. `seen`: a step by the
    clock of a GPU, where the host's tells nothing of a step's parts. Names end in their unit; what is not known is left
    out. docs/watch.md tells what each one says.
    """
    newest = seen or next(reversed(measured.steps), None)
    steps = [each for each in measured.steps if newest and each.setup == newest.setup][-most:]
    found: dict[str, float] = {
        "steps": measured.stats.steps,
        "steps_here": measured.begun,
        "ranks": measured.ranks,
        "total_sent_bytes": measured.stats.total.traffic.sent_bytes,
    }
    found |= {} if measured.warm_up is None else {"warm_up_steps_left": measured.warm_up.steps_left}
    found |= _means([_of_step(step, measured) for step in steps])
    found |= {} if seen is None else _timed(seen, summed(each.record for each in seen.costs), measured)
    if {"step_seconds", "exposed_seconds"} <= found.keys():
        found["compute_seconds"] = max(0.0, found["step_seconds"] - found["exposed_seconds"])
    return found | (feedback(steps[-1].costs) if steps else {})


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each number over those that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: column[0] if len(column) == 1 else statistics.fmean(column) for name, column in columns.items()}


def _of_step(step: Step, measured: Measured) -> dict[str, float]:
    cost = summed(each.record for each in step.costs)
    traffic, _ = cost.earlier
    found: dict[str, float] = {
        "rounds": traffic.rounds,
        "payload_bytes": traffic.payload_bytes,
        "sent_bytes": traffic.sent_bytes,
        "host_bytes": traffic.host_bytes,
    }
    now = traffic.sent_bytes if measured.ranks > 1 else float(traffic.payload_bytes)
    found |= {"ratio": dense_bytes(step.costs, measured) / now} if now else {}
    found |= {"step_seconds": step.interval} if step.interval else {}
    return found | (_timed(step, cost, measured) if measured.on_host else {})


def _timed(step: Step, cost: Record, measured: Measured) -> dict[str, float]:
    """Return the parts of a step's seconds, by the clock that took its marks."""
    found = {f"{kind}_seconds": value for kind, value in zip(KINDS, cost.earlier[1], strict=True)}
    late = None if measured.sharded else exposed(step)
    if late is not None:
        found["exposed_seconds"] = late
    held, sent = link_use(cost.record for cost in step.costs)
    return found | ({"link_bytes_per_second": sent / held} if held and sent else {})


def dense_bytes(costs: Iterable[BucketStats], measured: Measured) -> float:
    """Return the bytes that leave a rank if gradients are sent uncompressed; on one rank, the bytes of its gradients.

    In two levels a rank sends its share of them to other hosts.
    """
    return sum(_dense_bytes(cost, measured) for cost in costs)


def _dense_bytes(cost: BucketStats, measured: Measured) -> float:
    here, ranks = float(cost.elements * cost.element_bytes), measured.ranks
    if ranks == 1:
        return here
    scopes = {scope for scope, _, _ in cost.record.requests}
    if scopes == {"host"}:
        return 0.0
    shares = 1 if "all" in scopes else cost.per_host
    hosts = ranks // shares
    return (SHARDED if measured.sharded else DENSE) * here / shares * (hosts - 1) / hosts


def exposed(step: Step) -> float | None:
    """Seconds of communication that no computation hid; None where nobody noted them.

    In our own DDP from the last gradient until all averages were handed out; under a hook from the last bucket until the
    last average.
    """
    if step.ended:
        last_gradient = max(step.ready.values(), default=step.last_launch)
        return max(0.0, step.ended - step.computed - last_gradient + step.last_launch)
    ends = [end for cost in step.costs for _, _, end in cost.record.spans]
    if not ends or step.launched or step.overlapped:
        return None
    return max(0.0, max(ends) - max(cost.given for cost in step.costs))


def feedback(costs: Iterable[BucketStats]) -> dict[str, float]:
    """Return the measures of error feedback on this rank, over all buckets, by the last sample of each that has arrived.

    Norms are those of the samples times the root of how many elements each of theirs stands for: exact for buckets below
    8192 elements. Never waits for a GPU.
    """
    samples = list(_samples(costs))
    gradient = sum(weight for weight, _ in samples)
    if not gradient:
        return {}
    held, along, meant, sent = (
        sum(weight * numbers[place] for weight, numbers in samples) for place in range(1, len(Sample._fields))
    )
    whole = Sample(math.log(gradient) / 2, held / gradient, along / gradient, meant / gradient, sent / gradient)
    norms = {"gradient_norm": math.sqrt(gradient), "residual_norm": math.sqrt(held)}
    return {**norms, "residual_ratio": whole.ratio, "cosine": whole.cosine}


def _samples(costs: Iterable[BucketStats]) -> Iterator[tuple[float, Sample]]:
    """(square of the gradient's norm, sample) of each bucket that has one."""
    for cost in costs:
        sample = cost.feedback.here if cost.feedback is not None else None
        if sample is not None:
            yield math.exp(2 * min(sample.log_gradient, LARGEST)) * stride(cost.elements), sample
