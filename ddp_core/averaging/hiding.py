"""Proposes how exactly buckets may be sent, from the seconds that steps have taken: what hides is sent exactly."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from ...compress import Compressor, dry_run
from ...compress.protocol.compressor import marked
from ...compress.state.agreed import Choice, agree_in
from ..measure.record import link_use
from ..measure.step import BucketStats, Step
from ..memory.bucket_memory import BucketMemory
from .exactness import Graded, most_exact

Names: TypeAlias = tuple[str, ...]  # of the parameters in a bucket
STEPS = 8  # that a proposal goes by


class Sample(NamedTuple):
    """Of a step, on this rank: seconds of computation, those until each bucket was ready, and seconds a byte sent."""

    computation: float
    ready: dict[Names, float]
    seconds_a_byte: float


class Hiding:
    """Watches the steps of a rank. Only the first rank's proposals count, and the ranks agree on them inside of programs."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=STEPS)
        self._arithmetic: dict[tuple[Names, int], float] = {}  # seconds that a method last computed for a bucket
        self._sent: dict[tuple[Names, int], float] = {}  # bytes
        self._end: float | None = None  # of the last step
        self._agreed = False  # in the last step, which took longer for it

    def check(self, last: Step, number: int, buckets: Iterable[tuple[Names, BucketMemory]]) -> None:
        """Before step `number`, from 0; `last`: the one before it, empty where there was none like it."""
        since, self._end = self._end, None
        programs = [each for each in last.programs if each.record.spans]
        known = [(names, bucket.choice) for names, bucket in buckets if bucket.choice is not None]
        mine = [each for each in known if each[1].layout.rank == 0 and not each[1].flat.is_cuda]
        if programs and mine:
            self._end = max(end for each in programs for _, _, end in each.record.spans)
            if since is not None and not self._agreed:
                self._samples.append(_sample(programs, since))
                self._note_arithmetic(programs, dict(mine))
        self._agreed = agree_in(number)
        if self._agreed and self._samples:
            self._propose(mine)

    def _note_arithmetic(self, programs: Sequence[BucketStats], choices: dict[Names, Choice]) -> None:
        for each in programs:
            if (choice := choices.get(each.parameters)) is not None and choice.known:
                self._arithmetic[each.parameters, choice.now] = each.record.encode + each.record.decode

    def _propose(self, mine: Sequence[tuple[Names, Choice]]) -> None:
        """The median of what the last steps had time for."""
        found: dict[Names, list[int]] = {}
        for sample in self._samples:
            there = sorted((each for each in mine if each[0] in sample.ready), key=lambda each: sample.ready[each[0]])
            if there:
                buckets = [self._graded(*each, sample) for each in there]
                chosen = most_exact(buckets, sample.computation, there[0][1].budget or 0.0)
                for (names, _), method in zip(there, chosen, strict=True):
                    found.setdefault(names, []).append(method)
        for names, choice in mine:
            if names in found:
                choice.proposed = statistics.median_low(found[names])

    def _graded(self, names: Names, choice: Choice, sample: Sample) -> Graded:
        """A method that was not tried yet is taken to compute as long as others, but for a plain sum."""
        tried = [seconds for (other, _), seconds in self._arithmetic.items() if other == names]
        seconds = [self._bytes(names, choice, place) * sample.seconds_a_byte for place in range(len(choice.methods))]
        for place, method in enumerate(choice.methods):
            guess = 0.0 if getattr(method, "averages", False) else min(filter(None, tried), default=0.0)
            seconds[place] += self._arithmetic.get((names, place), guess)
        return Graded(sample.ready[names], tuple(seconds), choice.good_enough if choice.known else choice.last)

    def _bytes(self, names: Names, choice: Choice, place: int) -> float:
        if (names, place) not in self._sent:
            self._sent[names, place] = dry_run(choice.methods[place], choice.layout).sent_bytes
        return self._sent[names, place]


def hiding_of(compressor: Compressor) -> Hiding | None:
    """What watches the steps of a compressor; None where times do not count for it."""
    return Hiding() if marked(compressor, "watches_time") else None


def _sample(programs: Sequence[BucketStats], since: float) -> Sample:
    """What a step took; `since`: the end of the one before it, by time.perf_counter."""
    ready = {each.parameters: max(0.0, each.record.spans[0][1] - since) for each in programs}
    held, sent = link_use(each.record for each in programs)
    return Sample(max(ready.values()), ready, held / sent if sent else 0.0)
