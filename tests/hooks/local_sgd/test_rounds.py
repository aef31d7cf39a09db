"""Rounds that fail at some sites and not at others: all sites have one model afterwards."""

import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

import gradwire
from gradwire.ddp_core.transport.protocol import Decorated
from gradwire.experiments.workloads.simulated_sites import Exchange, SimulatedSites
from gradwire.hooks.local_sgd.fragment import fragments
from gradwire.hooks.local_sgd.outer import outer
from gradwire.hooks.local_sgd.rounds import Rounds

from ...forked import Script
from .sites import GRACE, together, until

LONG = timedelta(minutes=2)


@pytest.fixture
def rounds(places):
    """Makes the rounds of a site: of a model whose two fragments are zero."""

    def made(sites, spec="none"):
        at = places(sites, limit=LONG, start=LONG)
        at.join("alike")
        parts = fragments({name: torch.zeros(3) for name in "ab"}, 2)
        return Rounds(at, parts, torch.empty(0), outer("sgd:lr=1"), gradwire.compressor(spec))

    return made


def all_of(made, difference=None, late=()):
    """A round of all sites; those that are late come once all others wait."""

    def run(site):
        if site in late:
            until(lambda: len(made[site].sites.town_waiting()) >= len(made) - len(late))
        each = None if difference is None else torch.ones(3) * difference
        return made[site].begin(each, None).result()

    results = together(len(made), run)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class Losing(Decorated):
    """Replies come, and are lost by `loses`."""

    def __init__(self, loses, inner):
        super().__init__(inner)
        self._loses = loses

    def start(self, request, channel):
        reply = self.inner.start(request, channel)
        return SimpleNamespace(wait=partial(self._loses, reply), abandon=reply.abandon, arrived=None)


def test_a_site_that_did_a_round_again_alone_takes_the_others_model(rounds, town, request, monkeypatch):
    made = [rounds(3) for _ in range(3)]
    second = made[1]
    second.sites.town_waiting = lambda: town.store._gatherings[request.node.name].waiting

    def loses_once(reply, timeout):
        reply.future.result(timeout.total_seconds())  # the others have the average
        monkeypatch.setattr(second, "decorate", None)
        monkeypatch.setattr(second.sites, "_phase", timedelta(seconds=0.2))  # it waits for nobody
        raise RuntimeError("on purpose")

    all_of(made)
    monkeypatch.setattr(second, "decorate", partial(Losing, loses_once))
    assert [each.sites for each in all_of(made, 5.0)] == [3, 1, 3]
    second.fragments[0].anchor += 1.0  # what it averaged alone
    assert len({each.digest() for each in made}) == 2
    monkeypatch.undo()
    assert [each.replaced for each in all_of(made, 7.0, late=[1])] == [False, True, False]
    assert len({each.digest() for each in made}) == 1
    assert [each.replaced for each in all_of(made, 7.0)] == [False] * 3
    assert {each.round for each in made} == {3}


def test_a_site_that_returns_takes_the_model_and_sends_later_what_it_had_held_back(rounds, town, request):
    """Top-k sends one number of three. The last site misses two rounds, one of each fragment."""
    made = [rounds(3, "topk:ratio=0.3") for _ in range(3)]
    all_of(made)
    all_of(made, torch.tensor([5.0, 3.0, 1.0]))
    for each in made:
        each.sites.grace = GRACE
        each.sites.town_waiting = lambda: town.store._gatherings[request.node.name].waiting
    for _ in "ba":
        assert [each.sites for each in all_of(made[:2], 0.0)] == [2, 2]
    for each in made:
        each.sites.grace = LONG / 3
    assert [each.replaced for each in all_of(made, 0.0, late=[0, 1])] == [False, False, True]
    assert {tuple(each.fragments[0].anchor.tolist()) for each in made} == {(-5.0, -3.0, 0.0)}
    assert [each.replaced for each in all_of(made, 0.0)] == [False] * 3
    for each in made:  # two sites sent the 1, and the last one its 3
        torch.testing.assert_close(each.fragments[0].anchor, torch.tensor([-5.0, -3.0 - 3 / 3, -2 / 3]))


def test_a_round_to_which_a_site_gives_nothing_brings_out_what_all_held_back_once(rounds):
    """Top-k sends one number of three: of the third round, of the first fragment again, it is the 3."""
    made = [rounds(3, "topk:ratio=0.3") for _ in range(3)]
    all_of(made)
    all_of(made, torch.tensor([5.0, 3.0, 1.0]))
    all_of(made, 0.0)
    together(3, lambda site: made[site].begin(torch.zeros(3) if site else None, None).result())
    assert {tuple(each.fragments[0].anchor.tolist()) for each in made} == {(-5.0, -3.0, 0.0)}


class FailsOnce(Decorated):
    """The first request of a site's round raises."""

    failed: ClassVar[set[int]] = set()

    def start(self, request, channel):
        if self.inner.ranks.rank not in FailsOnce.failed:
            FailsOnce.failed.add(self.inner.ranks.rank)
            raise RuntimeError("on purpose")
        return self.inner.start(request, channel)


def test_a_site_that_took_a_model_over_in_a_round_that_failed_gives_no_difference_from_its_old_one(rounds):
    made = [rounds(3) for _ in range(3)]
    all_of(made)
    second = made[1]
    second.fragments[0].anchor += 100.0
    second.lineage = second.digest()
    for each in made:
        each.decorate = FailsOnce
    FailsOnce.failed = set()
    assert [each.replaced for each in all_of(made, 5.0)] == [False, True, False]
    assert FailsOnce.failed == {0, 1, 2}
    assert {float(each.fragments[0].anchor[0]) for each in made} == {-5.0}


FORGETFUL = """
import time
from datetime import timedelta
import torch
import gradwire
from gradwire.experiments.workloads.simulated_sites import Exchange, SimulatedSites
from gradwire.hooks.local_sgd.fragment import fragments
from gradwire.hooks.local_sgd.outer import outer
from gradwire.hooks.local_sgd.rounds import Rounds
from gradwire.hooks.internet.server import Server

server = Server()
at = gradwire.Rendezvous(f"127.0.0.1:{server.port}", 2, start=timedelta(hours=1))
at.join("alike")
parts = fragments({"a": torch.zeros(3)}, 1)
rounds = Rounds(at, parts, torch.empty(0), outer("sgd:lr=1"), gradwire.compressor("none"))
rounds.begin(None, None)
while not any(each.waiting for each in server._gatherings.values()):
    time.sleep(0.01)
print("waits", flush=True)
"""


def test_a_process_ends_while_a_round_waits_for_sites():
    ended = Script(FORGETFUL).end()
    assert (ended.code, ended.out) == (0, "waits\n"), ended.errors


class Alone(SimulatedSites):
    """One site, whose rounds wait at a gate, or fail."""

    def __init__(self):
        super().__init__(Exchange(1), 0, LONG)
        self.fails, self.open = False, threading.Event()
        self.open.set()

    def meet(self, claim):
        assert self.open.wait(60)
        if self.fails:
            raise RuntimeError("on purpose")
        return super().meet(claim)


@pytest.fixture
def alone():
    """A site whose weight is minus the number of its steps, as averages of one site change nothing; and a step of it."""
    at, model = Alone(), torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"every": 1, "fragments": 1, "outer": "average", "compressor": "none"}
    local = gradwire.LocalSteps(model, optimizer, at=at, **options)

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    yield at, model, local, step
    local.close()


def test_the_next_average_has_the_changes_of_a_round_that_failed(alone):
    at, model, local, step = alone
    step()
    local.state_dict()  # its round has ended
    at.fails = True
    step()
    with pytest.raises(RuntimeError, match="on purpose"):
        step()
    assert "captured" not in local.state_dict()["parameters"]["weight"]
    at.fails = False
    step()
    local.finish()
    assert model.weight.item() == -4


def test_a_save_after_ctrl_c_waits_for_the_round_on_its_way(alone, monkeypatch):
    at, _, local, step = alone
    at.open.clear()
    step()

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(local, "_arrived", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step()
    threading.Timer(0.2, at.open.set).start()
    assert local.state_dict()["round"] == 1


def test_a_round_that_hangs_raises_at_once_until_its_transfer_moves_again(alone):
    at, model, local, step = alone
    at.patience = 0.3  # seconds
    at.open.clear()
    step()
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"has not ended within \d+ s: a site hangs"):
            step()
        at.patience = 60.0
    assert time.monotonic() - began < 30  # nobody waits for what has hung before
    local._rounds.note_move()
    threading.Timer(0.2, at.open.set).start()
    step()  # which waits again
    local.finish()
    assert model.weight.item() == -4


def test_a_round_whose_transfer_moves_is_waited_for_beyond_the_patience(alone):
    at, model, local, step = alone
    at.patience = 0.5  # seconds
    at.open.clear()
    step()
    moves = [threading.Timer(0.2 * number, local._rounds.note_move) for number in range(1, 8)]
    for each in [*moves, threading.Timer(1.5, at.open.set)]:
        each.start()
    step()
    local.finish()
    assert model.weight.item() == -2


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_local_sgd_whose_round_hangs_ends_without_a_wait(alone, end):
    at, _, local, step = alone
    at.patience = 0.1  # seconds
    at.open.clear()
    step()
    if end == "close":
        with pytest.raises(RuntimeError, match="a site hangs"):
            step()
    began = time.monotonic()
    getattr(local, end)()
    assert time.monotonic() - began < 30
    at.open.set()


def test_a_model_has_one_local_sgd_at_a_time(alone):
    _, model, local, step = alone
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match="has LocalSteps already, and both would average it"):
        gradwire.LocalSteps(model, optimizer, at=Alone())
    step()
    assert local.steps == 1
    local.finish()
    gradwire.LocalSteps(model, optimizer, at=Alone(), every=1, fragments=1).close()


@pytest.mark.parametrize("call", ["finish", "synchronize"])
def test_local_sgd_that_has_ended_says_so(alone, call):
    *_, local, _ = alone
    local.finish()
    with pytest.raises(RuntimeError, match="has ended"):
        getattr(local, call)()
    assert local.state_dict()["round"] == local.round
