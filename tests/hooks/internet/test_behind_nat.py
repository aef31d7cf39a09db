"""Sites of which one only dials out, as behind NAT, and the others reach each other."""

from datetime import timedelta

import pytest

from gradwire.hooks.internet.relay import Star

from ..local_sgd.sites import GRACE, Town, built, descend, together, until
from ..local_sgd.test_local_steps import assert_same, trained

SITES = 3
BEHIND = 0  # the site that nobody can dial


def test_through_a_relay_sites_send_all_to_it_also_where_they_reach_each_other(unused_port):
    town = Town(relay=True)
    listens = {"listen": f"127.0.0.1:{unused_port}"}
    made = [town.meeting_place(SITES, f"site {site}", **({} if site == BEHIND else listens)) for site in range(SITES)]
    lines = []

    def run(site):
        model, _, local = trained(site, made[site], finish=False)
        lines.append(made[site]._meeting.lines)
        local.finish()
        return model, local

    results = together(SITES, run)
    assert_same(model for model, _ in results)
    assert all(stats.sites == SITES for stats in results[0][1].history)
    assert [type(each) for each in lines] == [Star] * SITES
    assert [each._listener for each in made] == [None] * SITES
    town.store.close()


@pytest.mark.parametrize("comes", ["first", "last"])
def test_without_a_relay_a_site_that_nobody_can_dial_dials_those_that_came_before(
    places, town, request, unused_port, caplog, comes
):
    """Where it comes first, the others continue without it, and it comes behind them."""
    soon = {"limit": timedelta(seconds=3), "grace": GRACE} if comes == "first" else {}
    made = [places(SITES, **soon) for _ in range(SITES)]
    made[BEHIND]._listening = lambda: unused_port  # where nobody listens

    def run(site):
        if (site == BEHIND) == (comes == "last"):
            until(lambda: len(town.waiting(request.node.name)) >= (SITES - 1 if comes == "last" else 1))
        model, optimizer, local = built(site, made[site], overlap=False)
        while local.round < 4 or local.history[-1].sites < SITES:
            descend(model, optimizer, site, local.steps)
        local.finish()
        return model

    assert_same(together(SITES, run))
    assert (f"site {BEHIND} at 127.0.0.1:{unused_port} does not answer" in caplog.text) == (comes == "first")
