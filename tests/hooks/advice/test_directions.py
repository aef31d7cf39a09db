"""What is said of hosts' links, each of which has two directions."""

from gradwire.hooks.advice.directions import HostLink, told

GBIT = 1e9 / 8


def test_links_that_are_alike_take_one_line():
    links = [HostLink("a", 0, 0.94 * GBIT, 0.91 * GBIT), HostLink("b", 2, 0.93 * GBIT, 0.95 * GBIT)]
    assert list(told(links)) == ["links: each host sends and receives 0.91 Gbit/s to 0.95 Gbit/s"]


def test_a_direction_that_is_slow_on_one_host_is_named():
    fast = [HostLink(name, rank, GBIT, GBIT) for rank, name in enumerate("abc")]
    (line,) = told([*fast, HostLink("d", 3, 0.1 * GBIT, GBIT)])
    assert (
        line
        == "link of d (rank 3) sends 0.1 Gbit/s, the median of all links is 1 Gbit/s: every step waits for the slowest"
    )


def test_hosts_that_all_send_more_slowly_than_they_receive_are_all_named():
    assert len(list(told([HostLink("a", 0, 0.2 * GBIT, GBIT), HostLink("b", 1, 0.2 * GBIT, GBIT)]))) == 2


def test_nothing_is_said_where_nothing_was_measured():
    assert list(told([])) == []
