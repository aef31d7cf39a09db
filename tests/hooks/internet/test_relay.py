"""Sites that only dial out: the rendezvous passes their payloads on, each of which leaves its sender once."""

import json
import struct
from collections import Counter
from datetime import timedelta

import pytest
import torch

from gradwire.compress.protocol.requests import AllGather, AllReduce, AllToAll, ReduceScatter
from gradwire.hooks.internet import client
from gradwire.hooks.internet.link import Connection, dial
from gradwire.hooks.internet.records import BadRecord
from gradwire.hooks.internet.relay import _read_address
from gradwire.hooks.internet.secret import Secret
from gradwire.hooks.internet.server import Server

from ..local_sgd.sites import EVENT, Town, descend, met, together
from ..local_sgd.test_local_steps import assert_others_go_on, assert_same, trained

HERE = "127.0.0.1"
WAIT = timedelta(seconds=EVENT)


@pytest.fixture
def relay(monkeypatch):
    """A rendezvous that relays, for sites at which nobody can listen."""
    server = Server(relay=True)
    monkeypatch.setattr(client, "Listener", None)
    yield server
    server.close()


def sites_of(server, count, **options):
    return [Town.at(f"{HERE}:{server.port}", count, f"site {place}", **options) for place in range(count)]


def test_sites_that_nobody_can_dial_train_as_those_that_reach_each_other(relay, places):
    made = sites_of(relay, 2)
    through = together(2, lambda place: trained(place, made[place], seed=0, compressor="none"))
    direct = places(2), places(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "Listener", Listener)
        expected = together(2, lambda place: trained(place, direct[place], seed=0, compressor="none"))
    assert_same(model for model, _, _ in (*through, *expected))
    assert not relay._rooms


Listener = client.Listener


def test_every_collective_through_a_relay_is_what_it_says(relay):
    count = 3
    made = sites_of(relay, count)
    meetings = met(made)
    rank = [meeting.ranks.rank for meeting in meetings]
    given = [torch.arange(count * 2, dtype=torch.float32).view(count, 2) + 10 * place for place in rank]
    ordered = [given[rank.index(place)] for place in range(count)]

    def answers(place):
        wait = lambda request: meetings[place].start(request, 0).wait(WAIT)  # noqa: E731
        mine = given[place]
        return [
            wait(AllGather(mine)),
            wait(AllReduce(mine, "sum")),
            wait(AllToAll(mine)),
            wait(ReduceScatter(mine, "sum")),
        ]

    for place, (gathered, reduced, exchanged, scattered) in enumerate(together(count, answers)):
        assert torch.equal(gathered, torch.stack(ordered))
        assert torch.equal(reduced, sum(ordered))
        assert torch.equal(exchanged, torch.stack([each[rank[place]] for each in ordered]))
        assert torch.equal(scattered, sum(ordered)[rank[place]])


def test_an_all_gather_leaves_a_site_once_and_not_once_for_each_other(relay, places, monkeypatch):
    sent, send = Counter(), Connection.send

    async def counting(link, body):
        sent[link.peer] += len(body)
        await send(link, body)

    monkeypatch.setattr(Connection, "send", counting)
    count, payload = 4, torch.zeros(3 << 20, dtype=torch.uint8)

    def bytes_sent(meetings, peers):
        sent.clear()
        gathered = together(count, lambda place: meetings[place].start(AllGather(payload), 0).wait(WAIT))
        assert [tuple(each.shape) for each in gathered] == [(count, *payload.shape)] * count
        return sum(size for peer, size in sent.items() if peer.startswith(peers)) / count / payload.numel()

    relayed, direct = sites_of(relay, count), [places(count) for _ in range(count)]
    assert 1.0 < bytes_sent(met(relayed), "the relay") < 1.01
    monkeypatch.setattr(client, "Listener", Listener)
    assert 3.0 < bytes_sent(met(direct), "site") < 3.01


def test_when_a_site_leaves_the_others_go_on_through_the_relay(relay):
    assert_others_go_on(sites_of(relay, 3), 2, lambda: relay._gatherings["training"].number)


def test_a_relay_that_dies_is_named(relay, monkeypatch, caplog):
    monkeypatch.setattr(client, "SEARCH", 0.5)
    monkeypatch.setattr(client, "PAUSE", 0.1)
    meetings = met(made := sites_of(relay, 2))
    relay.close()
    for error in together(2, lambda place: meetings[place].tell([5])):
        assert isinstance(error, RuntimeError)
        assert f"the relay at {HERE}:{relay.port} closed the connection" in str(error)
    for error in together(2, lambda place: made[place].meet()):
        assert isinstance(error, RuntimeError)
        assert f"no rendezvous answers at {HERE}:{relay.port}" in str(error)


@pytest.mark.slow
def test_when_a_relay_dies_all_sites_continue_at_the_next_one_and_end_with_one_model(relay, monkeypatch, caplog):
    monkeypatch.setattr(client, "SEARCH", 0.5)
    monkeypatch.setattr(client, "PAUSE", 0.1)
    second = Server(relay=True)
    address = f"{HERE}:{relay.port}, {HERE}:{second.port}"
    made = [Town.at(address, 3, f"site {place}") for place in range(3)]

    def run(place):
        model, optimizer, local = trained(place, made[place], steps=4, finish=False)
        if place == 0:
            relay.close()
        for step in range(4, 8):
            descend(model, optimizer, place, step)
        local.finish()
        return model, local

    results = together(3, run)
    assert not [each for each in results if isinstance(each, Exception)]
    assert_same(model for model, _ in results)
    assert all(local.history[-1].sites == 3 for _, local in results)
    assert f"no rendezvous answers at {HERE}:{relay.port}: this site continues at {HERE}:{second.port}" in caplog.text
    second.close()


def test_a_site_that_does_not_come_to_the_relay_is_told_of(relay, monkeypatch):
    made = sites_of(relay, 2, limit=timedelta(seconds=1.5))
    monkeypatch.setattr(client, "ATTEMPTS", 1)
    monkeypatch.setattr(made[1], "_connected", lambda record: None)
    error, _ = met(made)
    assert isinstance(error, RuntimeError)
    assert "reach the rendezvous" in str(error)


async def asked(server, question):
    """The answer to a question of somebody who knows the secret."""
    mine = await dial(HERE, server.port, Secret(), "the relay")
    await mine.send(json.dumps(question).encode())
    answer = json.loads(await mine.receive())
    mine.close()
    return answer


@pytest.mark.parametrize("change", [{"token": "guessed"}, {"id": "x"}, {"prefix": "other"}, {"phase": -1.0}])
def test_the_relay_passes_on_nothing_of_a_site_that_is_not_in_the_meeting(relay, background, change):
    meetings = met(made := sites_of(relay, 2))
    right = {"ask": "relay", "prefix": "training", "token": made[0]._token, "id": made[0]._id, "phase": 1.0}
    assert background.run(asked(relay, {**right, **change}), EVENT)["error"] == "bad"
    assert together(2, lambda place: meetings[place].tell([5])) == [[[5], [5]]] * 2
    assert "has been in this meeting" in background.run(asked(relay, right), EVENT)["message"]


def test_a_server_that_relays_no_more_says_so():
    server = Server()
    (at,) = sites_of(server, 1)
    at._relayed = True  # as it was when the site asked first
    at.join("alike")
    with pytest.raises(RuntimeError, match="site 0 does not listen, and this rendezvous does not relay"):
        at.meet()
    server.close()


@pytest.mark.parametrize(
    "frame", [b"", b"\x00", struct.pack(">H", 3), struct.pack(">HH", 2, 1), struct.pack(">HH", 1, 3), b"\xff" * 50]
)
def test_a_frame_whose_destinations_cannot_be_is_refused(frame):
    with pytest.raises(BadRecord, match="a frame for the relay names"):
        _read_address(frame, 3)
