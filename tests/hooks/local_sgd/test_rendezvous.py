"""Where sites meet that come and go: addresses, trainings that have ended, and keys that other sites delete."""

import itertools
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch

from gradwire import LocalSteps, Rendezvous
from gradwire.hooks.local_sgd import rendezvous
from gradwire.hooks.local_sgd.rendezvous import KEPT

from .sites import LIMIT, Net, Town, descend, together

SHORT = {"limit": timedelta(seconds=LIMIT), "start": timedelta(seconds=1)}


@pytest.fixture(scope="module")
def town():
    return Town()


@pytest.fixture
def places(town, request):
    """Makes the rendezvous of a site: in a training of this test's own."""
    numbers = itertools.count()

    def made(sites, **options):
        return town.meeting_place(sites, f"site {next(numbers)}", **{"prefix": request.node.name, **SHORT, **options})

    return made


def built(site, at):
    model = Net(site)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, LocalSteps(model, optimizer, at=at, every=4, fragments=2, overlap=False)


def trained(site, at, steps, finish=True):
    """A site's model after so many steps."""
    model, optimizer, local = built(site, at)
    for step in range(steps):
        descend(model, optimizer, site, step)
    (local.finish if finish else local.close)()
    return model, local.round


@pytest.mark.parametrize("finish", [True, False])
def test_a_late_site_where_a_training_has_ended_raises_and_does_not_train_alone(places, finish):
    made = [places(2, start=timedelta(seconds=20)) for _ in range(2)]
    together(2, lambda site: trained(site, made[site], 4, finish))
    with pytest.raises(RuntimeError, match=r"only 1 of 2 sites came to .*site 2; a store serves one training"):
        trained(2, places(2), 4)


def test_a_site_that_returns_after_the_others_have_ended_raises_at_once(places):
    made, ended = [places(3, start=timedelta(minutes=10)) for _ in range(3)], threading.Event()

    def run(site):
        if site < 2:
            return trained(site, made[site], 16)
        model, optimizer, local = built(site, made[site])
        try:
            descend(model, optimizer, site, 0)
            ended.wait(60)
            for step in range(1, 16):
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
    assert first[1] == second[1] == 10
    assert isinstance(third, RuntimeError)
    assert "has ended, and site 2 has missed its end" in str(third)


def test_a_site_whose_last_round_failed_where_the_others_succeeded_raises(places):
    made = [places(2, start=timedelta(seconds=20)) for _ in range(2)]
    for each in made:
        each.join("alike")
    together(2, lambda site: made[site].meet())
    made[0].end(7)
    made[1].break_up(RuntimeError("on purpose"))
    with pytest.raises(rendezvous.TrainingEnded, match="site 1 has missed its end") as raised:
        made[1].meet()
    assert raised.value.round == 7


def test_a_site_that_was_in_the_last_round_of_the_others_ends_with_their_model(places):
    made = [places(2, start=timedelta(seconds=20)) for _ in range(2)]
    steps = (16, 20)  # the first one's last two rounds are those of its end
    first, second = together(2, lambda site: trained(site, made[site], steps[site]))
    assert first[1] == second[1] == 10
    for left, right in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_record_that_another_site_deletes_between_two_looks_reads_as_none(places):
    mine, theirs, over = places(1), places(1), threading.Event()

    def churn():
        while not over.is_set():
            for key, text in (("1/closed", '{"arrivals": []}'), ("1/arrival/1", "{}"), ("latest", "1")):
                theirs._store.set(key, text)
            for key in ("1/closed", "1/arrival/1", "latest"):
                theirs._store.delete_key(key)

    mine._store.add("1/count", 1)
    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    try:
        for _ in range(500):
            assert mine._record(1) in ({}, {"arrivals": []})
            assert mine._arrivals(1) in ([], [{}])
            assert mine._latest() in (0, 1)
    finally:
        over.set()
        thread.join(20)


def test_a_site_that_was_stopped_while_its_meeting_ended_gets_into_none_of_its_own(town, places):
    first, second = (places(2, start=timedelta(seconds=20)) for _ in range(2))
    for each in (first, second):
        each.join("alike")
    for _ in range(1 + KEPT):
        together(2, lambda site: (first, second)[site].meet())
    kept = town.store.num_keys()
    second._close(1, [{"id": second._id, "name": "site 1", "setup": "alike", "group": ""}], "alike")  # it wakes
    assert second._attend(1) is None
    assert town.store.num_keys() == kept


def test_a_site_that_is_stopped_between_two_looks_comes_late_and_raises_nothing(places, monkeypatch):
    first, second = (places(2, start=timedelta(seconds=20)) for _ in range(2))
    for each in (first, second):
        each.join("alike")
    together(2, lambda site: (first, second)[site].meet())
    look, clock = second._arrivals, time.monotonic

    def stopped(number):
        alone = [{"id": first._id, "name": "site 0", "setup": "alike", "group": ""}]
        for later in range(number, number + KEPT + 1):
            first._close(later, alone, "alike")
        monkeypatch.setattr(rendezvous.time, "monotonic", lambda: clock() + 1000)
        return look(number)

    monkeypatch.setattr(second, "_arrivals", stopped)
    assert second._attend(2) is None


def test_a_site_that_was_stopped_while_it_waited_goes_on_waiting_for_the_others(places, monkeypatch):
    first, second = (places(2, limit=timedelta(seconds=60)) for _ in range(2))
    for each in (first, second):
        each.join("alike")
    together(2, lambda site: (first, second)[site].meet())
    clock, slept, looked, look = time.monotonic, [0.0], threading.Event(), first._arrivals

    def stopped(number):
        if slept[0]:  # a look after its sleep
            looked.set()
        slept[0] = 1000.0
        return look(number)

    monkeypatch.setattr(first, "_arrivals", stopped)
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: clock() + slept[0])

    def meets(site):
        if site:
            assert looked.wait(20)
        return (first, second)[site].meet().ranks.world_size

    assert together(2, meets) == [2, 2]


@pytest.mark.parametrize(
    "address", ["10.0.0.1", ":29400", "10.0.0.1:port", "10.0.0.1:99999", "10.0.0.1:0", "[]:29400", "::1:29400", "[::1]"]
)
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ValueError, match=r"host:port, .* from 1 to 65535; got"):
        Rendezvous(address, 2)


def test_an_address_may_be_of_ipv6(town):
    try:
        socket.create_connection(("::1", town.store.port), timeout=5).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    at = Rendezvous(f"[::1]:{town.store.port}", 1)
    at.join("alone")
    assert at.meet().ranks.world_size == 1


def test_where_no_store_answers_that_is_told_at_the_first_attempt(monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "SEARCH", 1.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        port = taken.getsockname()[1]
        with pytest.raises(
            RuntimeError, match=rf"no rendezvous answers at .*: keep one there .* --port {port}`\. .*refused"
        ):
            Rendezvous(f"127.0.0.1:{port}", 2)
    assert "no rendezvous answers at 127.0.0.1" in caplog.text


def test_a_store_that_starts_a_little_later_is_found(caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    refused, kept = threading.Event(), []

    class Told:
        level = 0

        def handle(self, record):
            refused.set()

    def start():
        refused.wait(60)
        kept.append(rendezvous.keep(port))

    rendezvous.logger.addHandler(told := Told())
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    try:
        at = Rendezvous(f"127.0.0.1:{port}", 1)
    finally:
        rendezvous.logger.removeHandler(told)
        thread.join(60)
    at.join("alone")
    assert at.meet().ranks.world_size == 1
