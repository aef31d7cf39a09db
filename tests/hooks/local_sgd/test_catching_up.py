"""A site that lacks the others' model gets it, alone and in pieces: a slow line takes as long as it needs."""

from collections import Counter
from datetime import timedelta

import pytest
import torch

import gradwire
from gradwire.hooks.internet import meeting
from gradwire.hooks.internet.link import Connection
from gradwire.hooks.local_sgd.fragment import fragments
from gradwire.hooks.local_sgd.outer import outer
from gradwire.hooks.local_sgd.rounds import Rounds

from .sites import LIMIT, together, until

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
    sent, send = Counter(), Connection.send

    async def counting(link, body):
        sent[link.peer.startswith("the relay")] += len(body) if len(body) > SIZE else 0
        await send(link, body)

    monkeypatch.setattr(Connection, "send", counting)
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
