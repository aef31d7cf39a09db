"""What is said of hosts' links, each of which has two directions."""

import pytest

from gradwire.hooks.advice.link_directions import HostLink, described

GBIT = 1e9 / 8


def measured(up, down):
    """Links as they are measured, in Gbit/s: one host's direction against all others, each of which carries its part."""
    parts = len(up) - 1
    others = [[place for place in range(len(up)) if place != host] for host in range(len(up))]
    return [
        HostLink(
            "abcdefgh"[host],
            host,
            GBIT * min(up[host], parts * min(down[other] for other in others[host])),
            GBIT * min(down[host], parts * min(up[other] for other in others[host])),
        )
        for host in range(len(up))
    ]


@pytest.mark.parametrize("hosts", [2, 4])
def test_links_that_are_alike_take_one_line(hosts):
    links = measured([0.94, 0.91, 0.92, 0.93][:hosts], [0.94] * hosts)
    assert list(described(links)) == ["links: each host sends and receives 0.91 Gbit/s to 0.94 Gbit/s"]


@pytest.mark.parametrize("hosts", [3, 4, 8])
@pytest.mark.parametrize(("does", "slow"), [("sends", 0), ("receives", 1)])
def test_the_one_host_that_is_slow_in_a_direction_is_named_alone(hosts, does, slow):
    rates = [[1.0] * hosts, [1.0] * hosts]
    rates[slow][2] = 0.1
    (line,) = described(measured(*rates))
    assert line == f"link of c (rank 2) {does} 0.1 Gbit/s, an ordinary one 1 Gbit/s: every step waits for the slowest"


def test_hosts_that_all_send_more_slowly_than_they_receive_are_all_named():
    assert [line[:19] for line in described(measured([0.1] * 4, [1.0] * 4))] == [
        f"link of {name} (rank {rank}) " for rank, name in enumerate("abcd")
    ]


def test_between_two_hosts_a_way_is_named():
    (line,) = described(measured([1.0, 0.1], [1.0, 1.0]))
    assert line == "link from b (rank 1) to a (rank 0): 0.1 Gbit/s, back 1 Gbit/s: every step waits for the slower"


def test_nothing_is_said_where_nothing_was_measured():
    assert list(described([])) == []
