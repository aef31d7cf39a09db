"""When a meeting is closed, and who is in it: by arrivals at times that are written down."""

import pytest

from gradwire.hooks.internet.late_sites import NEW, Claim
from gradwire.hooks.internet.server_meetings import Arrival, Gathering

PHASE, START, SITES = 10.0, 1000.0, 3
LIMIT = 3 * PHASE


def arrive(gathering, sites, now, met=0, claim=None, grace=PHASE, count=SITES):
    """Of each site, which is a letter."""
    claim = claim or Claim("", NEW)
    for site in sites:
        gathering.add(Arrival(site, site, "", "", 1, "alike", met, count, PHASE, grace, START, claim, now))


def begun(members):
    """A training of which three sites have met, and then these alone."""
    gathering = Gathering()
    arrive(gathering, "abc", 0.0)
    assert len(gathering.review(0.0)) == SITES
    return gathering if set(members) == {*"abc"} else met_again(gathering, members, 20.0, 1)


def met_again(gathering, members, now, number):
    """The same after a meeting of these sites, of which the first come at `now`."""
    arrive(gathering, members, now, met=gathering.number, claim=Claim(gathering.training, number))
    assert set(gathering.review(now) or gathering.review(now + LIMIT)) == set(members)
    return gathering


def closes(gathering, after):
    """The records of a meeting that is closed at that time and not before."""
    assert gathering.review(after - 0.1) == {}
    answers = gathering.review(after)
    assert {answer["kind"] for answer in answers.values()} <= {"record"}
    return answers


@pytest.mark.parametrize(
    ("members", "later", "waits", "met"),
    [
        ("b", "ac", PHASE, "ac"),  # more than half of the last majority
        ("bc", "a", LIMIT, ""),  # of few the others may be on their way
        ("c", "b", LIMIT, "b"),  # less than half of the last majority
    ],
)
def test_sites_that_are_back_wait_for_those_that_went_on(members, later, waits, met):
    gathering = begun(members)
    arrive(gathering, later, 50.0, met=1, claim=Claim(gathering.training, 2))
    assert sorted(closes(gathering, 50.0 + waits)) == sorted(met)


def test_a_minority_waits_the_whole_limit_and_no_site_is_left_out_because_another_s_third_is_over():
    gathering = begun("abc")
    arrive(gathering, "c", 50.0, met=1, claim=Claim(gathering.training, 1), grace=2.0)
    assert gathering.review(50.0 + LIMIT - 0.1) == {}
    arrive(gathering, "b", 50.0 + LIMIT - 0.1, met=1, claim=Claim(gathering.training, 1), grace=2.0)
    assert sorted(closes(gathering, 50.0 + LIMIT + 1.9)) == ["b", "c"]


def test_exactly_half_with_the_site_that_came_first_waits_a_third_and_without_it_the_whole_limit():
    for half, waits in (("a", PHASE), ("b", LIMIT)):
        gathering = Gathering()
        arrive(gathering, "ab", 0.0, count=2)
        gathering.review(0.0)
        arrive(gathering, half, 50.0, met=1, claim=Claim(gathering.training, 1), count=2)
        assert sorted(closes(gathering, 50.0 + waits)) == [half]


def test_a_training_whose_majority_died_goes_on_and_waits_for_the_dead_once():
    gathering = begun("c")
    for number in range(2, 9):
        arrive(gathering, "c", 50.0 + number, met=gathering.number, claim=Claim(gathering.training, number))
        assert set(gathering.review(50.0 + number)) == {"c"}
    arrive(gathering, "x", 70.0)
    arrive(gathering, "c", 70.0, met=gathering.number, claim=Claim(gathering.training, 9))
    assert set(gathering.review(70.0)) == {"c", "x"}


def test_a_majority_that_is_back_goes_on_with_its_model_and_the_minority_takes_that():
    gathering = met_again(begun("c"), "c", 51.0, 2)
    for site, number in (("a", 1), ("b", 1), ("c", 4)):
        arrive(gathering, site, 60.0, met=1, claim=Claim(gathering.training, number))
    answers = gathering.review(60.0)
    assert {(answer["kind"], answer["round"]) for answer in answers.values()} == {("record", 1)}
    assert [site["id"] for site in answers["c"]["sites"]] == ["a", "b", "c"]


def test_after_another_limit_the_minority_is_the_training():
    gathering = met_again(begun("c"), "c", 51.0 + LIMIT, 9)
    for site, number in (("a", 1), ("b", 1), ("c", 10)):
        arrive(gathering, site, 95.0, met=1, claim=Claim(gathering.training, number))
    assert {answer["round"] for answer in gathering.review(95.0).values()} == {10}


def test_the_end_of_a_minority_does_not_end_the_training_of_the_others():
    gathering = begun("c")
    gathering.end(gathering.number, 8)
    arrive(gathering, "ab", 60.0, met=1, claim=Claim(gathering.training, 1), grace=2.0)
    assert sorted(closes(gathering, 62.0)) == ["a", "b"]
    gathering.end(gathering.number, 9)
    arrive(gathering, "c", 80.0, met=2, claim=Claim(gathering.training, 8))
    assert gathering.review(80.0)["c"]["error"] == "ended"


@pytest.mark.parametrize(
    ("times", "closed"),
    [
        ({"a": 50.0}, 50.0 + LIMIT),  # alone it waits for the others
        ({"a": 50.0, "b": 55.0}, 50.0 + PHASE),  # so do two of four
        ({"a": 50.0, "b": 50.0, "c": 51.0}, 53.0),  # most are there
        ({"b": 50.0, "c": 50.0}, 50.0 + LIMIT),  # but not without the one that came first
        ({"a": 50.0, "b": 50.0, "x": 50.0}, 50.0 + PHASE),  # a newcomer does not count
    ],
)
def test_once_most_sites_are_there_the_last_ones_have_a_grace(times, closed):
    gathering = Gathering()
    arrive(gathering, "abcd", 0.0, count=4)
    gathering.review(0.0)
    for site, time in times.items():
        met, claim = (0, None) if site == "x" else (1, Claim(gathering.training, 1))
        arrive(gathering, site, time, met=met, claim=claim, grace=2.0, count=4)
    assert gathering.review(closed - 0.1) == {}
    assert set(gathering.review(closed)) == set(times)


def test_a_site_s_timers_are_at_the_ends_of_its_waits():
    gathering = Gathering()
    arrive(gathering, "a", 50.0, grace=2.0)
    assert list(gathering.deadlines(gathering.waiting["a"])) == [52.0, 50.0 + PHASE, 50.0 + LIMIT, 50.0 + START]


def test_of_sites_with_unlike_graces_a_timer_is_at_the_end_of_the_shortest():
    gathering = begun("abc")
    claim = Claim(gathering.training, 2)
    for site, grace, time in (("a", 5.0, 100.0), ("b", 30.0, 110.0)):
        arrive(gathering, site, time, met=1, claim=claim, grace=grace)
    assert gathering.review(114.9) == {}
    assert 115.0 in gathering.deadlines(gathering.waiting["b"])
    assert set(gathering.review(115.0)) == {"a", "b"}


def test_a_newcomer_is_behind_the_others_and_dials_them_whoever_asked_first():
    gathering = begun("abc")
    arrive(gathering, "d", 50.0)
    arrive(gathering, "cab", 50.0, met=1, claim=Claim(gathering.training, 2))
    answers = gathering.review(50.0)
    assert [site["id"] for site in answers["d"]["sites"]] == ["a", "b", "c", "d"]
    arrive(gathering, "ad", 60.0, met=2, claim=Claim(gathering.training, 3))  # b and c fail, and come again
    assert [site["id"] for site in gathering.review(60.0 + PHASE)["a"]["sites"]] == ["a", "d"]


@pytest.mark.parametrize("claim", [Claim("", NEW), Claim("3" * 16, 9)])
def test_sites_without_the_model_wait_for_all_sites_of_a_training_whose_others_are_gone(claim):
    gathering = begun("b")
    arrive(gathering, "de", 50.0, claim=claim)
    assert gathering.review(50.0 + LIMIT) == {}
    assert {answer["error"] for answer in gathering.review(50.0 + START).values()} == {"alone"}


def test_new_sites_wait_the_whole_limit_where_those_of_the_training_are_all_gone():
    gathering = begun("abc")
    arrive(gathering, "def", 50.0)
    assert gathering.review(49.9 + LIMIT) == {}
    answers = gathering.review(50.0 + LIMIT)
    assert [site["id"] for site in answers["d"]["sites"]] == ["d", "e", "f"]
