"""Where sites meet that come and go: addresses, trainings that have ended, and servers that start late or anew."""

import logging
import socket
import threading
from datetime import timedelta

import pytest

from gradwire import Rendezvous
from gradwire.hooks.internet import client
from gradwire.hooks.internet.late_sites import Claim
from gradwire.hooks.internet.secret import Secret
from gradwire.hooks.internet.server import Server, refuse_open
from gradwire.hooks.internet.server_meetings import Gathering

from ..local_sgd import sites
from ..local_sgd.sites import EVENT, GRACE, LIMIT, descend, met, together, until
from ..local_sgd.test_local_steps import assert_same

PLACE = {"limit": timedelta(seconds=LIMIT), "start": timedelta(seconds=EVENT)}
SOON = timedelta(seconds=0.3)  # where others are awaited in vain
OURS, THEIRS = "0" * 15 + "1", "3" + "f" * 15
SECRET = "a secret of this test alone"


def built(site, at):
    return sites.built(site, at, momentum=0.9, overlap=False)


def trained(site, at, steps, finish=True):
    """A site's model after so many steps."""
    model, optimizer, local = built(site, at)
    for step in range(steps):
        descend(model, optimizer, site, step)
    (local.finish if finish else local.close)()
    return model, local.round


@pytest.mark.parametrize("finish", [True, False])
def test_a_late_site_where_a_training_has_ended_raises_and_does_not_train_alone(places, finish):
    made = [places(2) for _ in range(2)]
    together(2, lambda site: trained(site, made[site], 4, finish))
    with pytest.raises(RuntimeError, match=r"only 1 of 2 sites came within 0.3 s: site 2\. Start the other"):
        trained(2, places(2, start=SOON), 4)


def test_a_site_that_returns_after_the_others_have_ended_raises_at_once(places):
    made, ended = [places(3, grace=GRACE) for _ in range(3)], threading.Event()

    def run(site):
        if site < 2:
            return trained(site, made[site], 8)
        model, optimizer, local = built(site, made[site])
        try:
            descend(model, optimizer, site, 0)
            ended.wait(60)
            for step in range(1, 8):
                descend(model, optimizer, site, step)
        finally:
            local.close()
        return local.round

    def until_others_end(site):
        result = run(site)
        if site == 0:
            ended.set()
        return result

    first, second, third = together(3, until_others_end)
    assert first[1] == second[1] == 6
    assert isinstance(third, RuntimeError)
    assert "has ended, and site 2 has missed its end" in str(third)


def joined(places, count, **options):
    """Sites that are set up alike and have met once."""
    made = [places(count, **options) for _ in range(count)]
    return made, met(made)


def test_a_site_whose_last_round_failed_where_the_others_succeeded_raises(places):
    made, _ = joined(places, 2)
    made[0].end(7)
    made[1].break_up(RuntimeError("on purpose"))
    with pytest.raises(client.TrainingEnded, match="site 1 has missed its end") as raised:
        made[1].meet()
    assert raised.value.round == 7


def test_a_site_that_was_in_the_last_round_of_the_others_ends_with_their_model(places):
    made = [places(2) for _ in range(2)]
    steps = (8, 12)  # the first one's last two rounds are those of its end
    first, second = together(2, lambda site: trained(site, made[site], steps[site]))
    assert first[1] == second[1] == 6
    assert_same([first[0], second[0]])


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (Claim(THEIRS, 900), f"refuses site 2: it is of training {THEIRS}, the others are of {OURS}"),
        (Claim(OURS, 900), "refuses site 2: it is at round 900, where the others are at 5"),
    ],
)
def test_a_site_of_another_training_or_ahead_of_the_majority_is_refused_by_name_and_the_others_go_on(
    places, caplog, claim, words
):
    made, _ = joined(places, 3)
    claims = [Claim(OURS, 5)] * 2 + [claim]
    first, second, third = together(3, lambda site: made[site].meet(claims[site]))
    assert (first.claim, sorted(first.names)) == (Claim(OURS, 5), ["site 0", "site 1"])
    assert second.claim == first.claim
    with pytest.raises(RuntimeError, match=words):
        raise third
    assert "has refused site 2" in caplog.text


def test_two_trainings_on_one_server_do_not_merge(places):
    made, _ = joined(places, 2)
    claims = [Claim(OURS, 5), Claim(THEIRS, 9)]
    for error in together(2, lambda site: made[site].meet(claims[site])):
        with pytest.raises(RuntimeError, match=f"different trainings, {OURS} and {THEIRS}, and none has a majority"):
            raise error


def test_a_site_that_waits_where_the_server_ends_sees_it(monkeypatch, caplog):
    monkeypatch.setattr(client, "SEARCH", 0.1)
    server, waiting = Server(), threading.Event()
    met = Gathering.add
    monkeypatch.setattr(Gathering, "add", lambda *args: (met(*args), waiting.set()))
    at = Rendezvous(f"127.0.0.1:{server.port}", 2, name="site 0", **PLACE)
    at.join("alike")

    def run(place):
        if place == 0:
            return at.meet()
        assert waiting.wait(EVENT)
        server.close()

    error, _ = together(2, run)
    assert isinstance(error, RuntimeError)
    assert "no rendezvous answers at" in str(error)
    assert "closed the connection" in caplog.text


def test_a_server_that_starts_anew_is_found_again_and_waits_for_as_many_sites_as_there_were(unused_port):
    server = Server(port=unused_port)
    at = [Rendezvous(f"127.0.0.1:{server.port}", 3, name=f"site {site}", grace=GRACE, **PLACE) for site in range(3)]
    first = met(at)
    at[2].close()
    together(2, lambda site: at[site].meet(Claim(first[0].claim.training, 1)))
    server.close()
    again = Server(port=server.port)
    claim = Claim(first[0].claim.training, 2)
    meetings = together(2, lambda site: at[site].meet(claim))
    again.close()
    assert [(each.ranks.world_size, each.claim) for each in meetings] == [(2, claim)] * 2


def test_sites_that_begin_anew_without_an_end_have_a_new_training_and_may_have_new_options(places):
    made, first = joined(places, 2)
    for each in made:
        each.close()
        each.join("other")
    again = together(2, lambda site: made[site].meet())
    assert again[0].claim.training == again[1].claim.training != first[0].claim.training


def test_a_site_that_listens_at_all_addresses_gives_the_others_one_that_they_reach(unused_port):
    server = Server(secret=SECRET)
    listens = {"listen": f"0.0.0.0:{unused_port}"}, {}
    at = [Rendezvous(f"127.0.0.1:{server.port}", 2, secret=SECRET, **options) for options in listens]
    for each in at:
        each.join("alike")

    def meets(site):
        if site == 1:  # who comes later dials
            until(lambda: any(each.waiting for each in list(server._gatherings.values())))
        return at[site].meet()

    meetings = together(2, meets)
    assert together(2, lambda site: meetings[site].tell([5])) == [[[5], [5]]] * 2
    server.close()


ADDRESSES = ["10.0.0.1", ":29400", "10.0.0.1:port", "10.0.0.1:99999", "10.0.0.1:0", "[]:29400", "::1:29400", "[::1]"]
UNPRINTABLE = ["two\nlines", "\x1b[31mred", "bell\x07", "x" * 201, "right\u202eleft"]
REFUSED = [  # an argument, what it is given, and what the message says
    *(("address", each, "host:port, .* from 1 to 65535; got") for each in ADDRESSES),
    *((what, each, "1 to 200 printable characters in one line") for what in ("name", "prefix") for each in UNPRINTABLE),
    *(("grace", timedelta(seconds=each), "from 0 to a third of limit") for each in (-1.0, LIMIT / 3 + 0.1)),
]


@pytest.mark.parametrize(("what", "given", "words"), REFUSED)
def test_an_argument_that_cannot_be_is_refused(what, given, words):
    with pytest.raises(ValueError, match=words):
        Rendezvous(**{"address": "127.0.0.1:1", "sites": 2, "limit": timedelta(seconds=LIMIT), what: given})


def test_an_address_may_be_of_ipv6():
    try:
        server = Server(host="::1")
    except RuntimeError as error:
        pytest.skip(f"no IPv6 here: {error}")
    made = [Rendezvous(f"[::1]:{server.port}", 2) for _ in range(2)]
    meetings = met(made)
    assert together(2, lambda site: meetings[site].tell([site])) == [[[0], [1]]] * 2 or meetings[0].ranks.rank
    server.close()


def test_where_no_server_answers_that_is_told_at_the_first_attempt(monkeypatch, caplog):
    monkeypatch.setattr(client, "SEARCH", 0.1)
    monkeypatch.setattr(client, "PAUSE", 0.1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"no rendezvous answers at .*: keep one there .* --port {port}`\. .*"):
            Rendezvous(f"127.0.0.1:{port}", 2)
    assert "no rendezvous answers at 127.0.0.1" in caplog.text
    assert f"the rendezvous at 127.0.0.1:{port} does not answer: " in caplog.text


def test_a_server_that_starts_a_little_later_is_found(unused_port, caplog):
    refused, kept = threading.Event(), []

    def start():
        refused.wait(60)
        kept.append(Server(port=unused_port))

    (told := logging.Handler()).emit = lambda record: refused.set()
    client.logger.addHandler(told)
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    try:
        at = Rendezvous(f"127.0.0.1:{unused_port}", 1)
    finally:
        client.logger.removeHandler(told)
        thread.join(60)
    at.join("alone")
    assert at.meet().ranks.world_size == 1
    kept[0].close()


def test_another_secret_takes_no_part(tmp_path):
    server = Server(secret=SECRET)
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    address = f"127.0.0.1:{server.port}"
    Rendezvous(address, 1, secret=file).close()
    for secret in ("", f"{SECRET}!"):
        with pytest.raises(RuntimeError, match="does not accept this site's secret: give all sites the same one"):
            Rendezvous(address, 1, secret=secret)
    server.close()


def test_the_environment_s_secret_is_used(monkeypatch):
    server = Server(secret=SECRET)
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET)
    Rendezvous(f"127.0.0.1:{server.port}", 1).close()
    server.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "8.8.8.8", "::", "100.64.0.1", "::ffff:8.8.8.8"])
def test_without_a_secret_an_address_that_strangers_reach_is_refused(host):
    with pytest.raises(ValueError, match="without a secret sites listen at loopback and private addresses alone"):
        Server(host=host)


def test_a_site_without_a_secret_warns_of_what_that_means(places, caplog):
    places(1)
    assert "site 0 has no secret: whoever reaches" in caplog.text


def test_sites_of_another_release_are_refused(places, monkeypatch):
    made = [places(2) for _ in range(2)]
    for site, each in enumerate(made):
        monkeypatch.setattr(client, "_release", lambda site=site: f"9.{site}")
        each.join("alike")
    results = together(2, lambda site: made[site].meet())
    (error,) = [each for each in results if isinstance(each, ValueError)]
    assert "set up differently: the others have alike, limit=90 s, grace=30 s, gradwire 9." in str(error)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.0.1", "::1", "fd00::1", "fe80::1"])
def test_without_a_secret_a_private_address_is_allowed(host):
    refuse_open(host, Secret())
