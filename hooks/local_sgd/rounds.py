"""Rounds: each averages one fragment over those that take part. A site that was away first takes the others' model."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from ...compress import Compressor, Layout, Ranks
from ...compress.simulate import operations_of
from ...ddp_core.engine.lanes import Task
from ...ddp_core.measure.step import Record
from ...ddp_core.memory.bucket_memory import BucketMemory
from ...ddp_core.transport.protocol import Decorator, Transport
from ...kernels import all_finite
from ..internet.late_sites import NEW, Claim, judge
from ..internet.meeting import Meeting
from .buffers import change, with_buffers, within
from .fragment import Fragment
from .inside import Sites
from .outer import Outer
from .outliers import buffer_limits, largest_average, largest_change, shares_of
from .reports import DIGEST, RoundStats, SiteReport, digest_of, identity, is_weight, norm_of
from .unfrozen import anchors, flags, joined

logger = logging.getLogger(__name__)
ATTEMPTS = 5  # of a round, among whoever is left
COMPARED = 100  # rounds from one comparison of the models to the next, where sites may round differently


@dataclass(frozen=True)
class Given:
    """The part that this site gives to a round.

    `difference`: of the fragment whose turn it is; None where there is none, as after a start. `unfrozen`: the first values
    of parameters that the user has unfrozen. `weight`: of the site in the average.
    """

    difference: Tensor | None
    buffers: Tensor | None
    unfrozen: Mapping[str, Tensor]
    weight: float


class Round:
    """One attempt at a round, in one meeting: tell, find the claim, catch up, average, apply.

    A failure before `apply` leaves what the sites have in common as it was, but for two things. `catch_up` may have taken
    over a model whole (`Rounds.took_over`), and has noted its `lineage`. After it `training` and `round` are the meeting's.
    If it took over a model, or `round` changed, the next attempt gives no difference from the model before.
    """

    def __init__(self, rounds: Rounds, meeting: Meeting, given: Given) -> None:
        self._rounds, self._meeting, self._given = rounds, meeting, given
        self.turn, self.shares, self.clipped = rounds.turn, list[float](), list[float]()
        self.limits, self.far = list[float](), list[bool]()

    def run(self, began: float) -> RoundStats:
        """Take part from the first message to the last. `began`: the time of the first attempt, by time.perf_counter."""
        rounds, before = self._rounds, self._meeting.sent_bytes
        reports = self.tell()
        claim = self.find_claim(reports)
        current = self.catch_up(reports, claim.round)
        rounds.training, rounds.round = claim.training, max(claim.round, 0)
        self.turn = rounds.turn
        able = [alike and each.able for alike, each in zip(current, reports, strict=True)]
        self.shares, self.clipped = shares_of(reports, able, rounds.outliers)
        self.limits = buffer_limits(reports, self.shares, rounds.outliers)
        drifts = [each.drift > most for each, most in zip(reports, self.limits, strict=True)]
        self.far = [factor < 1 or drifted for factor, drifted in zip(self.clipped, drifts, strict=True)]
        task = None
        if any(self.shares):
            flagged = {site: each.flags for site, each in enumerate(reports) if current[site]}
            joining = anchors(self._meeting, rounds.fragments, flagged, self._given.unfrozen)
            task = self.average()
            self.apply(task.result, largest_average(reports, self.shares, self.clipped, rounds.outliers))
            rounds.differ = self._meeting.differ
            compared = rounds.differ and rounds.round % COMPARED == 0
            rounds.lineage = rounds.digest() if compared else self._meeting.lineage
            if joining:  # after `apply`, which needs the fragment as it was averaged: this changes its layout
                rounds.join(rounds.joined | joining.keys(), joining)
        return self._stats(task, began, before)

    def tell(self) -> list[SiteReport]:
        """Give this site's report to the others, and return those of all."""
        rounds, given = self._rounds, self._given
        mine = SiteReport(
            claim=rounds.claim,
            able=given.difference is not None and bool(all_finite(given.difference)),
            drawn=secrets.randbelow(DIGEST),
            norm=0.0 if given.difference is None else norm_of(given.difference),
            owed=rounds.owed,
            weight=given.weight,
            drift=0.0 if given.buffers is None else rounds.drift(given.buffers),
            lineage=rounds.lineage,
            flags=flags(rounds.fragments, given.unfrozen),
        )
        return [SiteReport.of(row) for row in self._meeting.tell(mine.row)]

    def find_claim(self, reports: Sequence[SiteReport]) -> Claim:
        """Return the training and the round of the meeting: as the rendezvous found them, or by the sites' own words.

        Raises ValueError where ranks of a process group are of different trainings, or one is more than a round ahead.
        """
        meeting = self._meeting
        if meeting.claim is not None:
            return meeting.claim
        claims = (each.claim for each in reports)
        verdict = judge(dict(zip(meeting.names, claims, strict=True)), meeting.names, "")
        if verdict.refused:
            told = "; ".join(f"{name}: {reason}" for name, reason in verdict.refused.items())
            self._refuse(f"load states that all sites saved after one step of one training: {told}")
        return Claim(verdict.training or identity(reports[0].drawn), verdict.round)

    def _refuse(self, text: str) -> NoReturn:
        """Raise ValueError, as all sites do: once they have told each other, or who raises first would cut others short."""
        with suppress(RuntimeError):
            self._meeting.tell([0])
        raise ValueError(text)

    def catch_up(self, reports: Sequence[SiteReport], number: int) -> list[bool]:
        """Have all sites take the model of those at round `number`; return which sites had it already.

        It is the model that most of these have, of a tie the first site's. At the start it is the first site's.
        """
        meeting, rounds = self._meeting, self._rounds
        current = [each.claim.round == number for each in reports]
        if number != NEW and all(current) and len({each.lineage for each in reports}) == 1:
            return current
        digests = [digest for (digest,) in meeting.tell([rounds.digest()])]
        if number == NEW and rounds.divided and len(set(digests)) > 1:
            self._refuse(
                "the sites start with different weights, and equal ranks of different sites might take parts of different "
                "ones: start all sites with one seed, or load one checkpoint at all of them"
            )
        holders = [site for site, alike in enumerate(current) if alike]
        votes = Counter(digests[site] for site in holders)
        digest = digests[holders[0]] if number == NEW else max(votes, key=votes.__getitem__)
        source = next(site for site in holders if digests[site] == digest)
        if number != NEW and len(votes) > 1:
            others = ", ".join(meeting.names[site] for site in holders if digests[site] != digest)
            logger.warning("the model of %s differs from the majority's, which these sites take over", others)
        takers = [site for site, each in enumerate(digests) if each != digest]
        self._take_over(source, digest, joined(rounds.fragments, reports[source].flags), takers)
        rounds.took_over = rounds.took_over or meeting.ranks.rank in takers
        rounds.lineage = digest
        return [alike and (number == NEW or each == digest) for alike, each in zip(current, digests, strict=True)]

    def _take_over(self, source: int, digest: int, names: Collection[str], takers: Collection[int]) -> None:
        """Copy what another site has, all of it or nothing, to those that have another model.

        `names`: the parameters that have joined there.
        """
        meeting, rounds = self._meeting, self._rounds
        fresh = rounds.common
        if meeting.ranks.rank in takers:
            layouts = [part.layout_with(names) for part in rounds.fragments]
            empty = [torch.empty(each.numel, dtype=each.dtype) for each in layouts for _ in range(2)]
            fresh = [torch.empty_like(rounds.buffers), *empty]  # as `Rounds.common` lists them
        if takers:
            meeting.copy_from(source, fresh, takers, rounds.note_move)
        name = meeting.names[source]
        if digest_of(fresh) != digest:
            raise RuntimeError(f"the model from {name} is not the one that it has announced")
        if not all(bool(each.isfinite().all()) for each in fresh[1:]):  # a buffer may be infinite, such as a mask
            raise ValueError(f"the model of {name}, which other sites take over, has values that are not finite")
        rounds.join(names, {})
        for mine, theirs in zip(rounds.common, fresh, strict=True):
            mine.copy_(theirs)

    def average(self) -> Task:
        """Run the compressor's program. Its result is the mean difference; behind the last fragment's, the buffers'."""
        rounds, meeting, given = self._rounds, self._meeting, self._given
        share, clipped = self.shares[meeting.ranks.rank], self.clipped[meeting.ranks.rank]
        layout = rounds.fragments[self.turn].layout
        if share and given.difference is not None:
            flat = given.difference * (share * clipped)
            here = rounds.buffers if given.buffers is None else given.buffers
            buffers = share * within(here, rounds.buffers, self.limits[meeting.ranks.rank])
        else:
            flat, buffers = torch.zeros(layout.numel, dtype=layout.dtype), torch.zeros_like(rounds.buffers)
        program = rounds.memory(meeting.ranks).reduce(flat, rounds.round // len(rounds.fragments), watched=True)
        if self.turn == len(rounds.fragments) - 1 and buffers.numel():
            program = with_buffers(program, buffers)
        task = Task(program, "a local step's round")
        transport: Transport = meeting if rounds.decorate is None else rounds.decorate(meeting)
        while task.advance(transport, 0, meeting.timeout):
            pass
        return task

    def apply(self, average: Tensor | None, most: float) -> None:
        """Let the outer optimizer make its step, if the average is finite and its norm at most `most`.

        All sites have the same bits of it, unless they `differ`, and so decide alike.
        """
        assert average is not None
        rounds = self._rounds
        fragment, memory = rounds.fragments[self.turn], rounds.memories[self.turn]
        count = fragment.layout.numel
        finite = memory.finite is None or bool(memory.finite)
        norm = norm_of(average[:count]) if most < math.inf else 0.0
        good = finite and norm <= most
        memory.end_step(keep=good, any_rank_owes=False)
        memory.leaves.drop_room()  # rounds are rare: one fragment alone has a second copy, during its round
        rounds.round += 1
        if not good:
            told = f"has a norm of {norm:.3g}, where the sites' reports allow {most:.3g}" if finite else "is not finite"
            logger.warning("round %d is skipped: its average %s", rounds.round, told)
            return
        rounds.outer.step(fragment.anchor, average[:count].to(fragment.layout.dtype), fragment.momentum)
        if average.numel() > count:  # a buffer may be infinite, such as a mask
            buffers = within(average[count:], rounds.buffers, largest_change(self.shares, self.limits))
            rounds.buffers.copy_(torch.where(buffers.isfinite(), buffers, rounds.buffers))

    def _stats(self, task: Task | None, began: float, before: int | None) -> RoundStats:
        meeting, number = self._meeting, self._rounds.round
        traffic = (Record() if task is None else task.record).traffic
        seconds, after = time.perf_counter() - began, meeting.sent_bytes
        sent = traffic.sent_bytes if before is None or after is None else after - before
        far = tuple(name for name, far in zip(meeting.names, self.far, strict=True) if far)
        if far:
            logger.warning(
                "round %d: the differences or buffers of %s are far larger than the others'", number, ", ".join(far)
            )
        replaced, sites = not self.shares[meeting.ranks.rank], meeting.ranks.world_size
        return RoundStats(number, self.turn, sites, seconds, traffic.payload_bytes, sent, replaced, far)


class Rounds:
    """Keeps all fragments' anchors the same on all sites.

    `buffers`: flat, of a model that has any, averaged with the last fragment. `round`: finished ones; it tells whose turn it
    is among the fragments. A site that missed one takes the anchors of those that did not. One round runs at a time.
    `moved`: pieces of a model that have come from another site. A round may succeed at some sites alone, which others do
    again: `lineage` tells their models apart. It is a cheap stand-in for a digest: sites of equal lineage have equal models.
    Where sites may round differently, it is a digest after every COMPARED rounds, which the next reports compare.
    `training`: its identity, which all sites share, empty before the first round. A parameter that any site has unfrozen
    before a round is averaged at all sites after it. `divided`: other ranks of the site average other parts of the model,
    with rounds of their own.
    """

    def __init__(
        self,
        sites: Sites,
        fragments: Sequence[Fragment],
        buffers: Tensor,
        outer: Outer,
        compressor: Compressor,
        decorate: Decorator | None = None,
        outliers: str = "keep",
        *,
        divided: bool = False,
    ) -> None:
        self.sites, self.fragments, self.buffers = sites, list(fragments), buffers
        self.round, self.divided, self.training, self.moved = NEW, divided, "", 0
        self.differ = False  # True: the sites of the last meeting may round differently
        self.lineage = 0  # alike at sites whose models are: which meeting's average was the last, or a digest
        self.memories: dict[int, BucketMemory] = {}  # by fragment
        self.outer, self.compressor, self.decorate = outer, compressor, decorate
        self.outliers, self.took_over = outliers, False  # True: another model was taken over in this round
        self._abandoned = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradwire-local-steps")
        # the interpreter's end waits for that thread; what the standard library registers for this runs after it
        threading._register_atexit(_abandon, weakref.ref(self))  # type: ignore[attr-defined]

    @property
    def operations(self) -> set[str]:
        """The names of the kernels' operations that rounds run."""
        dtypes = {part.layout.dtype for part in self.fragments}
        return set[str]().union(*(operations_of(self.compressor, dtype, Ranks(2)) for dtype in dtypes))

    @property
    def claim(self) -> Claim:
        """This site's standing. Before the first round there is nothing that another training could spoil."""
        return Claim(self.training if self.round > 0 else "", self.round)

    @property
    def turn(self) -> int:
        """The number of the fragment whose round comes next."""
        return max(self.round, 0) % len(self.fragments)

    def begin(self, difference: Tensor | None, buffers: Tensor | None, weight: float = 1.0) -> Future[RoundStats]:
        """Average a difference of the fragment whose turn it is, None after a start. Raises ValueError for a bad weight."""
        if not is_weight(weight):
            raise ValueError(f"the weight of a site is a finite number above 0, such as its batch size; got {weight!r}")
        unfrozen = {name: value for part in self.fragments for name, value in part.unfrozen.items()}
        return self._thread.submit(self._until_done, Given(difference, buffers, unfrozen, weight))

    def _until_done(self, given: Given) -> RoundStats:
        began, failures, stood_at, self.took_over = time.perf_counter(), 0, self.round, False
        while True:
            meeting = self.sites.meet(self.claim)
            if self.round != stood_at or self.took_over:  # a failed attempt has changed what the difference is from
                given = replace(given, difference=None, buffers=None)
            try:
                return Round(self, meeting, given).run(began)
            except RuntimeError as error:
                failures += 1
                for memory in self.memories.values():
                    memory.end_step(keep=False, any_rank_owes=True)  # a site may still owe something
                if failures == ATTEMPTS:
                    raise RuntimeError(f"a round of LocalSteps failed {failures} times: {error}") from error
                self.sites.break_up(error)

    @property
    def joined(self) -> set[str]:
        """The names of the parameters that were frozen at the start, and are averaged now."""
        return {name for part in self.fragments for name in part.joined}

    def join(self, names: Collection[str], values: Mapping[str, Tensor]) -> None:
        """Average these of the parameters that were frozen at the start, and no others of them.

        `values`: the anchors of new ones. The compressor's residuals of all others stay.
        """
        for index, part in enumerate(self.fragments):
            if part.joined == {*names} & part.frozen.keys():
                continue
            part.join(names, values)
            if (here := self.memories.get(index)) is not None:
                place = replace(part.layout, ranks=here.layout.ranks)
                self.memories[index] = self._renewed(here, place)

    @property
    def common(self) -> list[Tensor]:
        """All that sites have in common."""
        return [self.buffers, *(each for part in self.fragments for each in (part.anchor, part.momentum))]

    def digest(self) -> int:
        """Return a digest of all that sites have in common."""
        return digest_of(self.common)

    def note_move(self) -> None:
        """A piece of a model has come."""
        self.moved += 1

    def memory(self, ranks: Ranks) -> BucketMemory:
        """The compressor's memory of the next fragment; residuals are carried over where others take part than before."""
        here = self.memories.get(self.turn)
        layout = replace(self.fragments[self.turn].layout, ranks=ranks)
        if here is None or here.layout != layout:
            here = self.memories[self.turn] = self._renewed(here, layout)
        return here

    def _renewed(self, here: BucketMemory | None, layout: Layout) -> BucketMemory:
        fresh = BucketMemory(self.compressor, layout, max(self.round, 0))
        if here is not None:
            fresh.carry_over({name: held for name, held in here.held_back().items() if name in layout.names})
        return fresh

    @property
    def owed(self) -> float:
        """The norm of all that compressors hold back here; 0 where nobody compares norms."""
        kept = self.memories.values() if self.outliers != "keep" else ()
        return math.hypot(*(norm_of(each) for memory in kept for each in memory.held_back().values()))

    def drift(self, buffers: Tensor) -> float:
        """Return the norm of the change of buffers since the last average; 0 where nobody compares norms."""
        return 0.0 if self.outliers == "keep" else norm_of(change(buffers, self.buffers))

    def close(self) -> None:
        """End the thread, once the round that runs has ended; at once after `abandon`."""
        self._thread.shutdown(wait=not self._abandoned, cancel_futures=True)
        self.sites.close()

    def abandon(self) -> None:
        """End without waiting; a round that waits for other sites fails."""
        self._abandoned = True
        self.sites.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _abandon(rounds: weakref.ref[Rounds]) -> None:
    """End what still waits for other sites."""
    if (here := rounds()) is not None:
        here.abandon()
