"""When a meeting is closed, and who is in it: by arrivals at times that are written down."""

import pytest

from gradwire.hooks.local_sgd.gathering import Arrival, Gathering
from gradwire.hooks.local_sgd.standing import NEW, Claim

PHASE, START, SITES = 10.0, 1000.0, 3


def arrive(gathering, site, now, met=0, claim=None, grace=PHASE, sites=SITES):
    gathering.add(
        Arrival(site, site, "alike", "", "", 1, met, sites, PHASE, grace, START, claim or Claim("", NEW), now)
    )


def begun(members):
    """A training of which three sites have met, and then these alone."""
    gathering = Gathering()
    for site in "abc":
        arrive(gathering, site, 0.0)
    assert len(gathering.review(0.0)) == SITES
    for site in members:
        arrive(gathering, site, 20.0, met=1, claim=Claim(gathering.training, 1))
    assert set(gathering.review(20.0 + PHASE)) == set(members)
    return gathering


@pytest.mark.parametrize(
    ("members", "later", "met"),
    [("b", "ac", ["a", "c"]), ("bc", "a", []), ("c", "b", [])],  # of few the others may be on their way
)
def test_more_sites_with_the_model_than_were_in_the_last_meeting_wait_no_longer_than_for_late_ones(members, later, met):
    gathering = begun(members)
    for site in later:
        arrive(gathering, site, 50.0, met=1, claim=Claim(gathering.training, 2))
    assert gathering.review(49.9 + PHASE) == {}
    answers = gathering.review(50.0 + PHASE)
    assert sorted(answers) == met
    assert {answer["kind"] for answer in answers.values()} <= {"record"}


@pytest.mark.parametrize(
    ("times", "closed"),
    [
        ({"a": 50.0}, 50.0 + PHASE),  # alone it waits for the others
        ({"a": 50.0, "b": 55.0}, 50.0 + PHASE),  # so do two of four
        ({"a": 50.0, "b": 50.0, "c": 51.0}, 53.0),  # most are there
        ({"a": 50.0, "b": 50.0, "x": 50.0}, 50.0 + PHASE),  # a newcomer does not count
    ],
)
def test_once_most_sites_are_there_the_last_ones_have_a_grace(times, closed):
    gathering = Gathering()
    for site in "abcd":
        arrive(gathering, site, 0.0, sites=4)
    gathering.review(0.0)
    for site, time in times.items():
        met, claim = (0, None) if site == "x" else (1, Claim(gathering.training, 1))
        arrive(gathering, site, time, met=met, claim=claim, grace=2.0, sites=4)
    assert gathering.review(closed - 0.1) == {}
    assert set(gathering.review(closed)) == set(times)


def test_a_site_s_timers_are_at_the_ends_of_its_waits():
    gathering = Gathering()
    arrive(gathering, "a", 50.0, grace=2.0)
    assert list(gathering.deadlines(gathering.waiting["a"])) == [52.0, 50.0 + PHASE, 50.0 + START]


def test_a_newcomer_is_behind_the_others_and_dials_them_whoever_asked_first():
    gathering = begun("abc")
    for site in "dcab":
        arrive(gathering, site, 50.0, met=int(site != "d"), claim=Claim(gathering.training, 2) if site != "d" else None)
    answers = gathering.review(50.0)
    assert [site["id"] for site in answers["d"]["sites"]] == ["a", "b", "c", "d"]
    for site in "ad":  # b and c fail, and come again
        arrive(gathering, site, 60.0, met=2, claim=Claim(gathering.training, 3))
    assert [site["id"] for site in gathering.review(60.0 + PHASE)["a"]["sites"]] == ["a", "d"]


@pytest.mark.parametrize("claim", [Claim("", NEW), Claim("3" * 16, 9)])
def test_sites_without_the_model_wait_for_all_sites_of_a_training_whose_others_are_gone(claim):
    gathering = begun("b")
    for site in "de":
        arrive(gathering, site, 50.0, claim=claim)
    assert gathering.review(50.0 + PHASE) == {}
    assert {answer["error"] for answer in gathering.review(50.0 + START).values()} == {"alone"}


def test_new_sites_wait_no_longer_than_for_late_ones_where_those_of_the_training_are_all_gone():
    gathering = begun("abc")
    for site in "def":
        arrive(gathering, site, 50.0)
    assert gathering.review(49.9 + PHASE) == {}
    answers = gathering.review(50.0 + PHASE)
    assert [site["id"] for site in answers["d"]["sites"]] == ["d", "e", "f"]
