"""A site that lacks the others' model gets it, alone and in pieces: a slow line takes as long as it needs."""

from collections import Counter
from concurrent.futures import TimeoutError as WaitTimeout
from datetime import timedelta

import pytest
import torch

import gradwire
from gradwire import LocalSteps
from gradwire.hooks.internet import meeting
from gradwire.hooks.internet.link import Link
from gradwire.hooks.local_sgd.fragment import fragments
from gradwire.hooks.local_sgd.outer import outer
from gradwire.hooks.local_sgd.rounds import Rounds

from .sites import LIMIT, Net, descend, together, until
from .test_threads import Gate

SIZE = 10_000  # parameters, and as many numbers of momentum, of 4 bytes each
WHOLE = 8 * SIZE


@pytest.fixture(params=["direct", "relay"])
def made(request, town, places):
    """Makes the rounds of sites, of which the last one has another model than the first."""
    town.store._relay = request.param == "relay"

    def of(count, **options):
        found = []
        for site in range(count):
            at = places(count, **options)
            at.join("alike")
            parts = fragments({"a": torch.full((SIZE,), float(site == count - 1))}, 1)
            found.append(Rounds(at, parts, torch.empty(0), outer("sgd:lr=1"), gradwire.compressor("none")))
        return found

    yield of
    town.store._relay = False


def catch_up(rounds, town):
    """The first round, to which the last site comes last."""

    def waiting():
        return len(town.waiting(rounds[0].sites._prefix))

    def run(site):
        until(lambda: site < len(rounds) - 1 or waiting() == site)
        return rounds[site].begin(None, None).result()

    wrong = [each for each in together(len(rounds), run) if isinstance(each, Exception)]
    assert not wrong
    assert {float(value) for each in rounds for value in each.fragments[0].anchor.unique()} == {0.0}


def test_the_model_goes_to_the_site_that_lacks_it_and_to_no_other(made, town, monkeypatch):
    sent, send = Counter(), Link.send

    async def counting(link, body):
        sent[link.peer.startswith("the relay")] += len(body) if len(body) > SIZE else 0
        await send(link, body)

    monkeypatch.setattr(Link, "send", counting)
    rounds = made(4)
    catch_up(rounds, town)
    assert rounds[3].moved == 2
    assert WHOLE <= sent[False] < 1.01 * WHOLE
    on_its_way_to_the_relay = sent[True]
    assert WHOLE * town.store._relay <= on_its_way_to_the_relay <= 1.01 * WHOLE * town.store._relay


def test_a_model_may_take_longer_than_a_wait_each_piece_has_one_of_its_own(made, town, monkeypatch):
    pieces, wait, waits = 25, meeting.SiteReply.wait, Counter()
    monkeypatch.setattr(meeting, "PIECE", WHOLE // pieces)

    def counted(reply, timeout):
        answer = wait(reply, timeout)
        waits[timeout] += not answer.numel()  # of a piece
        return answer

    monkeypatch.setattr(meeting.SiteReply, "wait", counted)
    rounds = made(2)
    catch_up(rounds, town)
    assert sum(each.moved for each in rounds) >= pieces
    assert waits[timedelta(seconds=LIMIT / 3)] >= pieces


class Flight:
    """A round that takes longer than patience lasts, while pieces of a model arrive."""

    def __init__(self, rounds, waits):
        self._rounds, self._waits = rounds, waits

    def result(self, timeout):
        if not self._waits:
            raise WaitTimeout
        self._rounds.moved += self._waits.pop()
        raise WaitTimeout if self._waits else Landed


class Landed(Exception):
    """The round has ended."""


def test_a_round_in_which_pieces_arrive_does_not_hang_and_one_in_which_none_do_does(places):
    model = Net(0)
    local = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), at=places(1))
    local._flight = Flight(local._rounds, [1, 1, 1])
    with pytest.raises(Landed):
        local._arrived()
    local._flight = Flight(local._rounds, [0, 0])
    with pytest.raises(RuntimeError, match=r"has not ended within .*: a site hangs"):
        local._arrived()
    local._flight = None
    local.close()


def test_a_round_that_hangs_is_waited_for_once(places, monkeypatch):
    gate, place, model, waits = Gate(), places(1), Net(0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"every": 1, "fragments": 1, "compressor": "none", "transport": gate}
    local = LocalSteps(model, optimizer, at=place, **options)
    gate.open.clear()
    descend(model, optimizer, 0, 0)
    result = local._flight.result
    monkeypatch.setattr(local._flight, "result", lambda timeout: waits.append(timeout) or result(timeout))
    with monkeypatch.context() as patch:
        patch.setattr(place, "patience", 0.1)
        for call in (optimizer.step, optimizer.step, local.state_dict):
            with pytest.raises(RuntimeError, match=r"has not ended within .*: a site hangs"):
                call()
    assert waits == [0.1, 0, 0]
    gate.open.set()
    until(lambda: local._flight.done())
    descend(model, optimizer, 0, 1)
    assert local.round == 1
    local.finish()


def test_the_end_of_local_sgd_does_not_wait_for_a_round_that_hangs(places):
    gate, place, model = Gate(), places(1), Net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSteps(model, optimizer, at=place, every=1, fragments=1, compressor="none", transport=gate)
    gate.open.clear()
    place.patience = 0.1
    descend(model, optimizer, 0, 0)
    with pytest.raises(RuntimeError, match="a site hangs"):
        optimizer.step()
    local.close()
    assert not local._flight.done()
    gate.open.set()
