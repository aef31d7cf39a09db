"""Connections of many ranks, of strangers from many networks, and to names with several addresses."""

import asyncio
import socket
from collections import Counter

import pytest

from gradwire.hooks.internet import link
from gradwire.hooks.internet.link import Listener, dial, network_of
from gradwire.hooks.internet.records import read, written
from gradwire.hooks.internet.secret import Secret
from gradwire.hooks.internet.server import Server

from ..local_sgd.sites import EVENT
from .test_attacks import QUESTION

HERE = "127.0.0.1"
RANKS = 300  # of a site, each with a training of its own at the rendezvous


def test_three_hundred_ranks_of_a_site_dial_at_once_and_all_meet(background):
    server = Server()
    closed = []
    server._listener._make_room = lambda: closed.append(1)

    async def meets(rank):
        mine = await dial(HERE, server.port, Secret(), "the rendezvous", EVENT)
        await mine.send(written({**QUESTION, "sites": 1, "prefix": f"rank {rank}", "id": str(rank)}))
        answer = read(await mine.receive(), "an answer")
        mine.close()
        return answer["kind"]

    async def all_at_once():
        return await asyncio.gather(*(meets(rank) for rank in range(RANKS)))

    assert background.run(all_at_once(), 2 * EVENT) == ["record"] * RANKS
    assert closed == []
    server.close()


class Task:
    """A connection that is not proven yet."""

    def __init__(self, place):
        self.place = place

    def cancel(self):
        """Close it."""


def victims(networks, count=2000):
    """How often each connection makes room for the next one, where all of these are open each time."""
    listener, found = Listener(Secret(), lambda _: None), Counter()
    for _ in range(count):
        tasks = {Task(place): network for place, network in enumerate(networks)}
        listener._strangers = dict(tasks)
        listener._make_room()
        (gone,) = tasks.keys() - listener._strangers.keys()
        found[gone.place] += 1
    return found


def test_strangers_of_one_network_take_no_place_from_another():
    same = [network_of(f"2001:db8:0:1::{place:x}") for place in range(1, 10)]
    found = victims([*same, network_of("2001:db8:0:2::1"), network_of("10.0.0.1")], count=200)
    assert set(found) == set(range(len(same)))


def test_where_all_strangers_are_of_different_networks_any_one_makes_room():
    """The oldest one would be that of an honest dial with a long round trip, each time."""
    found = victims([network_of(f"10.0.{place}.1") for place in range(20)])
    assert all(40 < found[place] < 180 for place in range(20))  # 100 each, on average


def test_a_dial_tries_the_next_address_of_a_name_where_the_first_swallows_packets(background, monkeypatch):
    """A listener whose queue is full answers no SYN, as a firewall that drops packets."""
    full = socket.create_server((HERE, 0), backlog=0)
    waiting = []
    for _ in range(3):
        each = socket.socket()
        each.setblocking(False)
        each.connect_ex(full.getsockname())
        waiting.append(each)
    listener = Listener(Secret(), lambda other: other.receive())
    port = background.run(listener.open(HERE, 0), EVENT)

    async def both(*_, **__):
        places = (full.getsockname(), (HERE, port))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    monkeypatch.setattr(background._loop, "getaddrinfo", both)
    monkeypatch.setattr(link, "NEXT_ADDRESS", 0.05)
    background.run(dial("two.example", port, Secret(), "it", EVENT), EVENT / 2)
    for each in (*waiting, full):
        each.close()
    background._loop.call_soon_threadsafe(listener.close)


def test_an_error_of_a_dial_names_the_address_once(background, unused_port):
    with pytest.raises(link.LinkError) as raised:
        background.run(dial("::1", unused_port, Secret(), "the rendezvous", 1.0), EVENT)
    assert str(raised.value).startswith(f"the rendezvous at [::1]:{unused_port} does not answer: ")
