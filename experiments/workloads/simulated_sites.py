"""A training by local SGD whose sites are simulated: their steps in turn in one process, their rounds on threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from ...compress.protocol.requests import Request
from ...compress.simulate import answered
from ...ddp_core.transport.protocol import Reply
from ...hooks.internet.late_sites import Claim
from ...hooks.internet.meeting import Meeting, SiteReply
from ...hooks.local_sgd.fixed_sites import WAITS
from ..results.comparison import RunResult
from .communication import NOT_MEASURED, of_local
from .data import Dataset
from .evaluation import digest_of
from .history import History
from .memory import reset_peak_memory
from .optimizers import optimizers_for, update
from .training import CPU, REPORT_EVERY, Report, TrainingConfig, initial_model, local_steps, loss_of, result_here

T = TypeVar("T")


class Exchange:
    """Answers the requests that sites on threads give in the same order, once all of them have given one."""

    def __init__(self, sites: int) -> None:
        self.sites, self._lock = sites, threading.Lock()
        self._turns = [0] * sites
        self._open: dict[int, dict[int, tuple[Request, Future[Tensor]]]] = {}

    def ask(self, site: int, request: Request) -> Future[Tensor]:
        """Give the next request of a site."""
        reply: Future[Tensor] = Future()
        with self._lock:
            turn = self._turns[site]
            self._turns[site] += 1
            asked = self._open.setdefault(turn, {})
            asked[site] = request, reply
            if len(asked) < self.sites:
                return reply
            del self._open[turn]
        replies = answered(request, [asked[place][0].tensor for place in range(self.sites)])
        for place, tensor in enumerate(replies):
            asked[place][1].set_result(tensor)
        return reply


class SimulatedMeeting(Meeting):
    """A site's part of the meeting of all sites."""

    def __init__(self, exchange: Exchange, site: int, timeout: timedelta) -> None:
        names = [f"site {place}" for place in range(exchange.sites)]
        super().__init__(dist.ProcessGroup(site, exchange.sites), names, timeout)  # nothing but rank and size
        self._exchange = exchange

    def _started(self, request: Request) -> Reply:
        return SiteReply(self._exchange.ask(self.ranks.rank, request))


class SimulatedSites:
    """All sites, at each of their rounds."""

    def __init__(self, exchange: Exchange, site: int, timeout: timedelta) -> None:
        self.patience = WAITS * timeout.total_seconds()
        self._meeting = SimulatedMeeting(exchange, site, timeout)

    def join(self, setup: str, operations: Collection[str] = (), *, varies_with_threads: bool = False) -> None:
        """Nothing: sites of one process are set up alike."""

    def meet(self, claim: Claim) -> Meeting:
        """Return the meeting of all sites."""
        return self._meeting

    def break_up(self, error: Exception) -> None:
        """Raise it: no site of a process comes or goes."""
        raise error

    def end(self, number: int) -> None:
        """Nothing: no site comes later."""

    def close(self) -> None:
        """Nothing: there are no connections."""


class Site:
    """One site's model, optimizers and batches."""

    def __init__(self, spec: str, config: TrainingConfig, dataset: Dataset, exchange: Exchange, place: int) -> None:
        self.spec, self.config = spec, config
        self.model = initial_model(config, dataset, CPU)
        self.optimizers = optimizers_for(self.model, "none", config.optimizer, config.rate, config.momentum)
        self.schedules = config.schedules(self.optimizers)
        self.batches = dataset.train_batches(config.batch_size, seed=config.seed, rank=place, world_size=exchange.sites)
        self._at = SimulatedSites(exchange, place, timedelta(seconds=config.timeout))

    def begin(self) -> Callable[[], None]:
        """Meet the other sites; return the function that averages the whole model at the end."""
        self.local = local_steps(self.spec, self.config, self.model, self.optimizers, at=self._at)
        return self.local.synchronize

    def step(self, *, synced: bool) -> float:
        """Train on one batch, and return its loss."""
        inputs, targets = next(self.batches)
        loss = loss_of(self.model, inputs, targets, autocast=self.config.autocast)
        (loss / self.config.sync_every).backward()
        if synced:
            update(self.optimizers, self.schedules)
        return loss.item()


def train_simulated_sites(spec: str, config: TrainingConfig, dataset: Dataset, count: int, report: Report) -> RunResult:
    """Return the result of `train` by local SGD on `count` ranks, by this process alone: losses and bytes are theirs.

    Seconds are CPU seconds of one site: its share of a step, rounds included. Raises RuntimeError where sites end with
    different parameters.
    """
    reset_peak_memory(CPU)
    exchange, history = Exchange(count), History()
    sites = [Site(spec, config, dataset, exchange, place) for place in range(count)]
    ends = together([site.begin for site in sites])
    for step in range(config.steps):
        start = time.process_time()
        synced = (step + 1) % config.sync_every == 0
        losses = [site.step(synced=synced) for site in sites]
        if step + 1 == config.steps:
            together(ends)
        history.add(sum(losses) / count, (time.process_time() - start) / count)
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == config.steps:
            report(history.look_at(history.losses[len(history.mean_losses) :]))
    digests = {digest_of(site.model) for site in sites}
    if len(digests) > 1:
        raise RuntimeError(f"the sites ended with different parameters: {sorted(digests)}")
    sent = replace(of_local(sites[0].local, config.optimizer_steps), seconds=NOT_MEASURED)
    result = result_here(spec, spec, config, sites[0].model, dataset, sent, history, count)
    for site in sites:
        site.local.close()
    return result


def together(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions at once, each of which waits for the others, and return their results."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(each) for each in functions]]
