"""Rounds that fail at some sites and not at others: all sites have one model afterwards."""

from datetime import timedelta
from typing import ClassVar

import pytest
import torch

import gradwire
from gradwire.ddp_core.transport.protocol import Decorated
from gradwire.hooks.local_sgd.fragment import fragments
from gradwire.hooks.local_sgd.outer import outer
from gradwire.hooks.local_sgd.rounds import Rounds

from ...forked import Script
from .sites import together, until

LONG = timedelta(minutes=2)


@pytest.fixture
def rounds(places):
    """Makes the rounds of a site: of a model whose two fragments are zero."""

    def made(sites, decorate=None):
        at = places(sites, limit=LONG, start=LONG)
        at.join("alike")
        parts = fragments({name: torch.zeros(3) for name in "ab"}, 2)
        return Rounds(at, parts, torch.empty(0), outer("sgd:lr=1"), gradwire.compressor("none"), decorate)

    return made


def all_of(made, difference=None, late=()):
    """A round of all sites; those that are late come once all others wait."""

    def run(site):
        if site in late:
            until(lambda: len(made[site].sites.town_waiting()) == len(made) - len(late))
        each = None if difference is None else torch.full((3,), difference)
        return made[site]._until_done(each, None)

    results = together(len(made), run)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_a_site_that_did_a_round_again_alone_takes_the_others_model(rounds, town, request, monkeypatch):
    made = [rounds(3) for _ in range(3)]
    second, applied = made[1], made[1]._apply
    second.sites.town_waiting = lambda: town.store._gatherings[request.node.name].waiting

    def fails_once(average, scale):
        monkeypatch.setattr(second, "_apply", applied)
        monkeypatch.setattr(second.sites, "_phase", timedelta(seconds=0.2))  # it waits for nobody
        raise RuntimeError("on purpose")

    all_of(made)
    monkeypatch.setattr(second, "_apply", fails_once)
    assert [each.sites for each in all_of(made, 5.0)] == [3, 1, 3]
    second.fragments[0].anchor += 1.0  # what it averaged alone
    assert len({each.digest() for each in made}) == 2
    monkeypatch.undo()
    assert [each.replaced for each in all_of(made, 7.0, late=[1])] == [False, True, False]
    assert len({each.digest() for each in made}) == 1
    assert [each.replaced for each in all_of(made, 7.0)] == [False] * 3
    assert {each.round for each in made} == {3}


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
        each._decorate = FailsOnce
    FailsOnce.failed = set()
    assert [each.replaced for each in all_of(made, 5.0)] == [False, True, False]
    assert FailsOnce.failed == {0, 1, 2}
    assert {float(each.fragments[0].anchor[0]) for each in made} == {-5.0}


FORGETFUL = """
import time
from datetime import timedelta
import torch
import gradwire
from gradwire.hooks.local_sgd.fragment import fragments
from gradwire.hooks.local_sgd.outer import outer
from gradwire.hooks.local_sgd.rounds import Rounds
from gradwire.hooks.local_sgd.server import keep

server = keep()
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
