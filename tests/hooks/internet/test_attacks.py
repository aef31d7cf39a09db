"""Strangers and faulty members at the loopback address: they change nothing, read nothing and stop nobody."""

import asyncio
import json
import random
import socket
import struct
import threading
from datetime import timedelta
from time import monotonic

import pytest
import torch

from gradwire import Rendezvous
from gradwire.hooks.internet import client, link
from gradwire.hooks.internet.link import FRAME, MAGIC, Connection, LinkError, Listener, dial
from gradwire.hooks.internet.mesh import Parking, connected
from gradwire.hooks.internet.records import Site
from gradwire.hooks.internet.secret import Secret
from gradwire.hooks.internet.server import Server

from ..local_sgd.sites import EVENT, LIMIT, met, together
from ..local_sgd.test_local_steps import assert_same, trained

SECRET = "a secret that no stranger knows"
HERE = "127.0.0.1"


@pytest.fixture
def server():
    made, escaped = Server(secret=SECRET), []
    made._background._loop.set_exception_handler(lambda loop, context: escaped.append(context))
    yield made
    made.close()
    assert escaped == []  # no input ends in an exception that nobody has caught


def member(server, sites, name, **options):
    options = {"limit": timedelta(seconds=LIMIT), "start": timedelta(seconds=EVENT), "secret": SECRET} | options
    return Rendezvous(f"{HERE}:{server.port}", sites, name=name, **options)


def two_members(server, **options):
    return [member(server, 2, f"site {site}", **options) for site in range(2)]


def sent_and_read(port, data):
    """What a listener answers to these bytes, until it closes the connection or a moment passes."""
    with socket.create_connection((HERE, port), timeout=EVENT) as stranger:
        try:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            return stranger.recv(1 << 16)
        except OSError:
            return b""


def malformed(source):
    """Bytes that are no proof: noise, a right beginning with noise behind it, or a giant length."""
    noise = source.randbytes(source.choice([0, 1, 47, 48, 80, 200]))
    return source.choice([noise, MAGIC + noise, MAGIC + bytes(32) + struct.pack(">I", 0xFFFFFFFF) + noise])


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_connections_change_nothing_while_sites_train(server, count):
    source, over = random.Random(0), threading.Event()
    answers, counts = set(), [0]

    def attack():
        while counts[0] < count:
            answers.add(sent_and_read(server.port, malformed(source))[: len(MAGIC)])
            counts[0] += 1
        over.set()

    attacker = threading.Thread(target=attack, daemon=True)
    attacker.start()
    made = two_members(server)
    results = together(2, lambda site: trained(site, made[site]))
    assert_same(model for model, _, _ in results)
    assert all(stats.sites == 2 for stats in results[0][2].history)
    assert over.wait(300)
    assert answers <= {b"", MAGIC}  # a listener shows a stranger nothing but its protocol's name and a random number
    assert len(server._gatherings) == 1


def test_a_thousand_idle_connections_delay_a_member_by_less_than_a_second(server, monkeypatch):
    monkeypatch.setattr(link, "HANDSHAKE", 1000.0)  # in which they have to prove themselves

    def seconds(number):
        """Of the arrival and the meeting of two sites."""
        began = monotonic()
        made = two_members(server, prefix=f"meeting {number}")
        assert [each.ranks.world_size for each in met(made)] == [2, 2]
        took = monotonic() - began
        for each in made:
            each.close()
        return took

    alone = min(seconds(number) for number in range(3))
    strangers = [socket.create_connection((HERE, server.port), timeout=EVENT) for _ in range(1000)]
    assert min(seconds(number) for number in range(3, 6)) < alone + 1  # a busy machine may stop one of them
    for each in strangers:
        each.close()


class Recorder:
    """A proxy on the loopback address that keeps the bytes of connections, and may change them."""

    def __init__(self, port, change=lambda data: data):
        self._target, self._change = port, change
        self._server = socket.create_server((HERE, 0))
        self.port, self.said = self._server.getsockname()[1], []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                here, _ = self._server.accept()
            except OSError:
                return
            there = socket.create_connection((HERE, self._target), timeout=60)
            self.said.append(bytearray())
            threading.Thread(target=self._pass, args=(here, there, self.said[-1]), daemon=True).start()
            threading.Thread(target=self._pass, args=(there, here, bytearray()), daemon=True).start()

    def _pass(self, source, target, kept):
        try:
            while data := source.recv(1 << 16):
                kept.extend(data)
                target.sendall(self._change(data) if len(kept) > len(data) + 200 else data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self):
        self._server.close()


def test_a_recorded_conversation_that_is_sent_again_changes_nothing(server):
    recorder = Recorder(server.port)
    at = Rendezvous(f"{HERE}:{recorder.port}", 1, secret=SECRET, prefix="recorded")
    at.join("alike")
    at.meet()
    at.end(3)
    at.close()
    recorder.close()
    known = server._gatherings["recorded"]
    before = (known.number, known.ended)
    assert before == (1, (1, 3))
    for said in recorder.said:
        assert bytes(said).startswith(MAGIC)
        answer = sent_and_read(server.port, bytes(said))
        assert answer[: len(MAGIC)] in (b"", MAGIC)
        assert answer[len(MAGIC) + link.NONCE :] in (b"", link.REFUSED)
    assert (known.number, known.ended) == before


def pair(background, serve, secret=SECRET):
    """A connection to a listener of this process, and the listener."""
    listener = Listener(Secret(secret), serve)
    port = background.run(listener.open(HERE, 0), EVENT)
    return background.run(dial(HERE, port, Secret(secret), "the listener"), EVENT), listener


def frames_of(background, written):
    """What the other end of a connection receives, and the error that ends it, where raw bytes are written."""
    got, ended = [], threading.Event()

    async def serve(other):
        try:
            while True:
                got.append(await other.receive())
        except LinkError as error:
            got.append(str(error))
            ended.set()

    mine, listener = pair(background, serve)

    async def write():
        await mine.send(b"first")
        mine._writer.write(written(mine))
        await mine._writer.drain()
        mine._writer.write_eof()

    background.run(write(), EVENT)
    assert ended.wait(EVENT)
    background._loop.call_soon_threadsafe(listener.close)
    return got


def frame(mine, counter, body, key=None):
    head = struct.pack(">I", len(body))
    return head + body + link._tag(key or mine._sending, counter, head, body)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (lambda mine: frame(mine, 0, b"first"), "forged, changed or repeated"),  # the same once more
        (lambda mine: frame(mine, 1, b"second", bytes(32)), "forged, changed or repeated"),
        (lambda mine: frame(mine, 2, b"later"), "forged, changed or repeated"),  # one was taken out
        (lambda mine: frame(mine, 1, b"second", mine._receiving), "forged, changed or repeated"),  # its own sent back
        (lambda mine: struct.pack(">I", FRAME + 1), f"announces {FRAME + 1} bytes where at most {FRAME} are allowed"),
        (lambda mine: frame(mine, 1, b"second")[:-1], "closed the connection"),
    ],
)
def test_a_frame_that_was_changed_repeated_moved_or_is_too_long_ends_the_connection(background, written, words):
    first, error = frames_of(background, written)
    assert first == b"first"
    assert words in error


def test_a_length_takes_no_memory_before_it_is_checked(background):
    import tracemalloc

    tracemalloc.start()
    try:
        frames_of(background, lambda mine: struct.pack(">I", 0xFFFFFFFF))
        assert tracemalloc.get_traced_memory()[1] < 64 * FRAME
    finally:
        tracemalloc.stop()


QUESTION = {"ask": "meet", "prefix": "forged", "id": "x", "name": "x", "setup": "x", "link": "", "host": HERE}
QUESTION |= {"port": 9, "met": 0, "epoch": "", "sites": 2, "known": 0, "training": "", "round": -1}
QUESTION |= {"phase": 1.0, "grace": 1.0, "start": 0.1}  # seconds


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is a JSON object"),
        (b"{}", "'ask' of type str, of printable characters; got None"),
        (b'{"ask": "dance", "prefix": "x"}', "to look, meet, relay or end; got 'dance'"),
        *(
            (json.dumps({**QUESTION, **change}).encode(), words)
            for change, words in [
                ({"port": "80"}, "'port' of type int; got '80'"),
                ({"port": -1}, "a port from 1 to 65535"),
                ({"port": 0}, "does not listen, and this rendezvous does not relay"),
                ({"sites": 10**9}, "1 to 1024 sites"),
                ({"met": True}, "'met' of type int; got True"),
                ({"phase": float("nan")}, "'phase' of type float; got nan"),
                ({"start": float("inf")}, "'start' of type float; got inf"),
                ({"round": 10**30}, "'round' of type int"),
                ({"setup": "x" * 20_000}, "'setup' of type str, of printable characters"),
                ({"training": "f" * 16}, "the identity of a training, of 16 hexadecimal digits"),
                ({"name": None}, "'name' of type str, of printable characters; got None"),
                ({"name": "x\nWARNING all is lost\x1b[31m"}, "'name' of type str, of printable characters; got 'x\\n"),
                ({"host": "x\u2028y"}, "'host' of type str, of printable characters"),
                ({"id": "\x07"}, "'id' of type str, of printable characters"),
            ]
        ),
    ],
)
def test_a_record_that_cannot_be_is_refused_by_a_clear_error_and_the_server_goes_on(server, background, text, words):
    async def asked():
        mine = await dial(HERE, server.port, Secret(SECRET), "the rendezvous")
        await mine.send(text)
        answer = json.loads(await mine.receive())
        mine.close()
        return answer

    answer = background.run(asked(), EVENT)
    assert answer["error"] == "bad"
    assert words in answer["message"]
    member(server, 1, "site 0").close()


@pytest.mark.parametrize(
    "text", [b"?", b"[]", b'{"token": 3}', b'{"token": "guessed", "id": "x", "to": "y"}', bytes(1000)]
)
def test_a_forged_introduction_to_a_site_changes_nothing(server, background, text):
    made = two_members(server)
    met(made)
    port = made[0]._bind[1]

    async def introduced():
        mine = await dial(HERE, port, Secret(SECRET), "the site")
        await mine.send(text)

    background.run(introduced(), EVENT)
    sent_and_read(port, b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
    for each in made:
        each.break_up(RuntimeError("on purpose"))
    meetings = together(2, lambda site: made[site].meet())
    assert together(2, lambda site: meetings[site].tell([5])) == [[[5], [5]]] * 2


def mutated(source):
    """A question with a field that is absent, doubled, of another type, or with a byte changed."""
    question, key = dict(QUESTION), source.choice(list(QUESTION))
    value = source.choice([None, True, -5, 1 << 70, 1e308, "", "\ud800", "x" * 9999, [], {}, [[[]]], {"a": 1}])
    question |= {key: value} if source.random() < 0.8 else {}
    text = bytearray(json.dumps(question).encode())
    if source.random() < 0.3:
        text[source.randrange(len(text))] = source.randrange(256)
    return bytes(text[: source.randrange(len(text))] if source.random() < 0.1 else text)


@pytest.mark.parametrize("count", [80, pytest.param(500, marks=pytest.mark.slow)])
def test_mutated_questions_of_a_member_stop_nobody(server, background, count):
    source = random.Random(1)

    async def asked(text):
        mine = await dial(HERE, server.port, Secret(SECRET), "the rendezvous")
        await mine.send(text)
        mine._writer.write_eof()  # a site that leaves at once
        try:
            return json.loads(await mine.receive()).get("kind")
        except LinkError:
            return None
        finally:
            mine.close()

    kinds = {background.run(asked(mutated(source)), EVENT) for _ in range(count)}
    assert kinds <= {"error", "here", "record", None}
    assert "error" in kinds
    assert [each.ranks.world_size for each in met(two_members(server))] == [2, 2]


class Answers:
    """A server that knows the secret, and answers each question with the same bytes."""

    def __init__(self, background, text):
        self._background, self._text = background, text
        self._listener = Listener(Secret(), self._serve)
        self.port = background.run(self._listener.open(HERE, 0), EVENT)

    async def _serve(self, other: Connection):
        question = json.loads(await other.receive())
        look = json.dumps({"kind": "here"}).encode()
        await other.send(look if question["ask"] == "look" else self._text)
        await other.end()


RECORD = {"kind": "record", "number": 1, "round": -1, "training": "0" * 16, "token": "t", "epoch": "e", "refused": []}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"?", "the answer of .* is not JSON"),
        (b"{}", "has a field 'kind' of type str"),
        (b'{"kind": "error"}', "has a field 'error' of type str"),
        (json.dumps(RECORD).encode(), "the record of a meeting from .* has a field 'sites' of type list"),
        (json.dumps({**RECORD, "training": "a", "sites": []}).encode(), "has the identity of a training; got 'a'"),
        (json.dumps({**RECORD, "sites": [3]}).encode(), "lists sites; got 3"),
        (json.dumps({**RECORD, "sites": [{}]}).encode(), "a site in the record .* has a field 'id'"),
        (json.dumps({**RECORD, "sites": []}).encode(), "does not have this site in it once"),
        (json.dumps({**RECORD, "refused": ["x\ny"], "sites": []}).encode(), "site in it once|names the sites"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_by_a_clear_error(background, text, words):
    at = Rendezvous(f"{HERE}:{Answers(background, text).port}", 1, secret="")
    at.join("alike")
    with pytest.raises(RuntimeError, match=words):
        at.meet()


@pytest.mark.parametrize("numbers", [[1, 2, 3], [1]])
def test_a_site_that_sends_another_size_is_named_and_nobody_dies(server, numbers):
    made = two_members(server)
    meetings = met(made)
    errors = together(2, lambda site: meetings[site].tell(numbers if site else [1, 2]))
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert any("message and size" in str(error) for error in errors)


def test_a_model_that_is_changed_on_its_way_is_not_taken(server):
    made = two_members(server)
    meetings = met(made)
    place = meetings[0].ranks.rank

    async def flip():  # a peer that has the secret, and sends a frame that it did not hash
        wire = next(each for each in meetings[0].lines.links if each)
        wire._writer.write(b"\x00\x00\x00\x10" + bytes(48))

    made[0]._background.run(flip(), EVENT)
    tensors = [torch.zeros(3), torch.ones(3)]
    errors = together(2, lambda site: meetings[site].copy_from(place, [tensors[site]]))
    assert any(isinstance(error, RuntimeError) and "forged, changed or repeated" in str(error) for error in errors)
    assert torch.equal(tensors[1], torch.ones(3))


def test_a_relay_that_crosses_the_connections_of_two_sites_connects_nobody(background):
    key, ids = Secret(SECRET), "abc"
    parked = [Parking(each) for each in ids]
    listeners = [Listener(key, each.park) for each in parked]
    ports = [background.run(each.open(HERE, 0), EVENT) for each in listeners]
    crossed = [ports[1], ports[0], ports[2]]

    def connect(rank):
        there = crossed if rank == 2 else ports
        seen = [Site(each, each, "", HERE, port) for each, port in zip(ids, there, strict=True)]
        return background.run(connected(seen, rank, "token", key, parked[rank], EVENT if rank == 2 else 0.5), EVENT)

    *others, third = together(3, connect)
    assert all(isinstance(each, LinkError) for each in others)
    for each in third[:2]:
        with pytest.raises(LinkError, match="closed the connection"):
            background.run(each.receive(), EVENT)
    for each in listeners:
        background._loop.call_soon_threadsafe(each.close)


class ClosesEarly(Recorder):
    """The same, whose first connections are closed in the midst of the proof."""

    def _run(self):
        for _ in range(4):
            here, _ = self._server.accept()
            here.recv(len(MAGIC) + link.NONCE)
            here.sendall(MAGIC + bytes(link.NONCE))
            here.recv(link.TAG)
            here.close()
        super()._run()


def test_a_connection_that_is_closed_early_is_no_refusal(server, monkeypatch):
    monkeypatch.setattr(client, "PAUSE", 0.01)
    proxy = ClosesEarly(server.port)
    Rendezvous(f"{HERE}:{proxy.port}", 1, secret=SECRET).close()
    proxy.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such option")
@pytest.mark.parametrize(("patience", "seconds"), [(1.0, 60), (200.0, 200)])
def test_both_ends_of_a_connection_find_out_that_the_other_host_has_vanished(background, patience, seconds):
    for here in sockets_of(background, patience):
        assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * seconds
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        idle, apart, count = (here.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
        assert idle + apart * count == 60


def test_both_ends_of_a_connection_send_small_frames_at_once(background):
    """Otherwise a short payload waits behind its head until the other end has confirmed that, a round trip later."""
    for here in sockets_of(background, 1.0):
        assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def sockets_of(background, patience):
    """Yield the sockets of both ends of a connection: of the end that dials, and of the one that has accepted it."""
    accepted = background.run(queue_of_links(), EVENT)
    listener = Listener(Secret(SECRET), accepted.put, patience)
    port = background.run(listener.open(HERE, 0), EVENT)
    ends = [
        background.run(dial(HERE, port, Secret(SECRET), "it", patience), EVENT),
        background.run(accepted.get(), EVENT),
    ]
    for each in ends:
        yield each._writer.get_extra_info("socket")
        background._loop.call_soon_threadsafe(each.close)
    background._loop.call_soon_threadsafe(listener.close)


async def queue_of_links():
    return asyncio.Queue()
