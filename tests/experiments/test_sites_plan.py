"""The plan of local SGD between sites: by formulas that are written down, and against the bytes of real sites."""

import pytest
import torch

import gradwire
from gradwire.experiments.sites_plan import Phase, SitesPlan, Wan, computing_share, recommended, round_plan, sites_plan
from gradwire.hooks.internet.background import Background
from gradwire.hooks.internet.relay import PART
from gradwire.hooks.internet.server import Server

from ..hooks.local_sgd.sites import Town, together
from ..hooks.local_sgd.test_local_steps import trained
from ..wan import Direction
from ..wan import Wan as Line

ELEMENTS, SITES, UP, DOWN, TRIP = 1 << 20, 4, 1e6, 4e6, 0.1


def waits(relay):
    """Connecting, proving twice, asking; and the reports, half a round trip apart, or a whole one through a relay."""
    return 4 * TRIP + delay(relay)


def delay(relay):
    return TRIP if relay else TRIP / 2


def last(payload):
    """Bytes of a payload's last frame, which a relay passes on when nothing goes up any more."""
    return (payload - 1) % PART + 1


def planned(spec, *, relay, down=DOWN):
    return round_plan(gradwire.compressor(spec), {"a": torch.empty(1024, 1024)}, Wan(SITES, UP, down, TRIP, relay))


@pytest.mark.parametrize("relay", [False, True])
def test_an_uncompressed_round_sums_a_part_at_each_site_and_sends_it_to_the_others(relay):
    size = 4 * ELEMENTS
    rows, part = size * 3 / 4, size / 4
    found = planned("none", relay=relay)
    assert (found.up, found.down) == (rows + part * (1 if relay else 3), rows + part * 3)
    gathered = part / UP + 3 * last(part) / DOWN if relay else part * 3 / UP
    exchanged = rows / UP + (last(part) / DOWN if relay else 0.0)  # each site gets one row at a time
    assert found.seconds == pytest.approx(exchanged + gathered + 2 * delay(relay) + waits(relay))


@pytest.mark.parametrize("relay", [False, True])
def test_a_gathered_payload_leaves_a_site_once_through_a_relay_and_else_once_for_each_other(relay):
    found = planned("topk:ratio=0.01", relay=relay)
    payload = found.down / 3
    assert 0.01 * ELEMENTS * 5 < payload < 0.01 * ELEMENTS * 9  # a value and a place each
    assert found.up == pytest.approx(payload * (1 if relay else 3))
    sent = found.up / UP + (3 * last(payload) / DOWN if relay else 0.0)
    assert found.seconds == pytest.approx(sent + delay(relay) + waits(relay), rel=0.02)


def test_a_payload_of_less_than_a_byte_per_site_takes_no_frame_s_time():
    assert Wan(8, 1.0, 1.0, relay=True).seconds(Phase(3.5, 3.5, 0.5, 7)) == pytest.approx(7.0)


def test_the_slower_direction_decides():
    assert planned("int4", relay=True, down=UP / 10).seconds > 9 * planned("int4", relay=False, down=UP).seconds - 10


@pytest.mark.parametrize(("step", "every", "computes"), [(10.0, 4, 1.0), (0.05, 64, 1.0), (0.001, 500, None)])
def test_a_plan_names_the_fewest_steps_with_which_sites_compute(step, every, computes):
    parameters = {str(place): torch.empty(512, 512, device="meta") for place in range(8)}
    found = sites_plan(gradwire.compressor("int4"), parameters, Wan(SITES, UP, DOWN, TRIP), step, 0.95)
    assert found.every == every
    shares = [computing_share(every, len(found.rounds), step, each.seconds) for each in found.rounds]
    assert found.computing == pytest.approx(len(shares) / sum(1 / share for share in shares))
    assert (found.computing >= 0.95) == (step > 0.001)
    assert computes in (None, found.computing)


def test_of_plans_with_frequent_averages_the_one_with_the_least_delay_is_recommended_else_the_most_frequent():
    plans = lambda *given: [SitesPlan(every, [None] * count, 1.0) for every, count in given]  # noqa: E731
    assert recommended(plans((64, 4), (32, 2), (16, 1), (16, 2), (8, 1))) == 3  # 8 steps, as the last one
    assert recommended(plans((8, 1), (8, 2), (8, 2))) == 1
    assert recommended(plans((500, 4), (256, 4), (128, 4), (64, 1))) == 3
    assert recommended(plans((500, 4), (64, 4), (64, 4))) == 1


@pytest.mark.parametrize("spec", ["none", "int4", "topk:ratio=0.5"])
def test_sites_send_through_a_relay_what_the_plan_says(spec, monkeypatch):
    """But for frames' heads and the sites' reports: some hundred bytes for each message and a byte for 30 of a payload."""
    town = Town(relay=True)
    made = [town.meeting_place(3, f"site {place}") for place in range(3)]
    _, _, local = together(3, lambda place: trained(place, made[place], seed=0, compressor=spec))[0]
    town.store.close()
    parts = [part.parameters for part in local._parts]
    for stats in local.history[1:]:
        found = round_plan(gradwire.compressor(spec), parts[stats.fragment], Wan(3, UP, DOWN, relay=True))
        assert 0 <= stats.sent_bytes - found.up < 1100


def test_a_round_over_slow_lines_takes_no_less_than_planned():
    """Two sites behind lines of their own, with half a megabit per second up; a machine may be slower, never faster."""
    size, rate, down, trip = 12000, 62500.0, 250000.0, 0.04
    server, background = Server(relay=True), Background()
    lines = [Line("127.0.0.1", server.port, Direction(rate, trip / 2), Direction(down, trip / 2)) for _ in range(2)]
    ports = [background.run(line.open(), 10) for line in lines]

    def site(place):
        model = torch.nn.Linear(size, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        at = Town.at(f"127.0.0.1:{ports[place]}", 2, f"site {place}")
        options = {"every": 1, "fragments": 1, "overlap": False, "compressor": "none"}
        local = gradwire.LocalSteps(model, optimizer, at=at, **options)
        model(torch.ones(1, size)).sum().backward()
        optimizer.step()
        local.close()
        return local

    first, second = together(2, site)
    for line in lines:
        background.run(line.close(), 10)
    background.close()
    server.close()
    weights = {"weight": torch.empty(1, size)}
    planned = round_plan(gradwire.compressor("none"), weights, Wan(2, rate, down, trip, relay=True))
    for local in (first, second):
        assert local.history[-1].seconds > 0.95 * planned.seconds
        assert local.history[-1].sent_bytes > planned.up
