"""What the requests of a step tell of the link that they took."""

from gradwire.ddp_core.measure.step import Record, link_use


def test_what_is_sent_inside_a_host_holds_no_link():
    record = Record([("host", 8, 8.0), ("all", 8, 16.0)], [("wait", 0, 5), ("wait", 5, 7)])
    assert link_use([record]) == (2, 16.0)


def test_requests_that_are_under_way_at_once_hold_the_link_once():
    first = Record([("all", 8, 8.0), ("across", 8, 4.0)], [("encode", 0, 1), ("wait", 1, 5), ("wait", 8, 9)])
    second = Record([("all", 8, 2.0), ("all", 8, 1.0)], [("wait", 2, 4), ("decode", 4, 6)])  # one without a reply yet
    assert link_use([first, second]) == (4 + 1, 14.0)
