"""Faulty members: what a site says of itself is measured and bounded by the others."""

import math

import pytest
import torch

import gradwire
from gradwire.ddp_core.averaging.same_kernels import follow_kernels, kernel_offer
from gradwire.hooks.internet import client
from gradwire.hooks.internet.meeting import CPU
from gradwire.hooks.internet.offers import checked_offers
from gradwire.hooks.internet.records import written
from gradwire.hooks.local_sgd import rounds as rounds_file
from gradwire.hooks.local_sgd.fragment import fragments
from gradwire.hooks.local_sgd.outer import outer
from gradwire.hooks.local_sgd.rounds import Rounds

from .sites import Net, built, descend, together

SITES, FAULTY = 4, 3


@pytest.fixture
def rounds(places):
    """Makes the rounds of a site: of a model of three zeros, and three that are frozen."""

    def made(outliers="keep", buffers=None):
        at = places(SITES)
        at.join("alike")
        parts = fragments({"a": torch.nn.Parameter(torch.zeros(3))}, 1, {"frozen": torch.zeros(3)})
        built = gradwire.compressor("none")
        buffers = torch.empty(0) if buffers is None else buffers.clone()
        return Rounds(at, parts, buffers, outer("sgd:lr=1"), built, outliers=outliers)

    return made


def averaged(made, differences, *, unfrozen=None, weights=(1.0,) * SITES):
    """The anchors of all sites after a round with these differences."""
    together(SITES, lambda site: made[site].begin(None, None).result())

    def run(site):
        part = made[site].fragments[0]
        if unfrozen is not None and site == FAULTY:
            part.unfrozen["frozen"] = unfrozen.clone()
        made[site].begin(torch.full((3,), differences[site]), None, weights[site]).result()
        return part.anchor.tolist()

    return together(SITES, run)


@pytest.mark.parametrize("outliers", ["clip", "drop"])
def test_a_site_that_sends_more_than_the_norm_that_it_reports_moves_nobody(rounds, monkeypatch, caplog, outliers):
    measured = rounds_file.norm_of
    monkeypatch.setattr(rounds_file, "norm_of", lambda numbers: 1e-3 if measured(numbers) > 50 else measured(numbers))
    found = averaged([rounds(outliers) for _ in range(SITES)], [1.0, 1.0, 1.0, -100.0])
    assert found == [[0.0] * 3] * SITES
    assert "round 1 is skipped: its average has a norm of 42, where the sites' reports allow 13" in caplog.text


def test_honest_sites_are_averaged_where_norms_are_limited(rounds):
    assert averaged([rounds("clip") for _ in range(SITES)], [1.0, 1.0, 3.0, -1.0]) == [[-1.0] * 3] * SITES


def test_a_giant_weight_does_not_decide_alone_where_outliers_are_limited(rounds):
    weights = [1.0, 1.0, 1.0, 1e30]
    for each in averaged([rounds("clip") for _ in range(SITES)], [1.0, 1.0, 1.0, -1.0], weights=weights):
        assert each == pytest.approx([0.0] * 3, abs=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_a_parameter_that_a_site_unfreezes_with_numbers_far_beyond_the_model_stays_frozen(rounds, caplog, value):
    made = [rounds() for _ in range(SITES)]
    found = averaged(made, [1.0] * SITES, unfrozen=torch.tensor([0.0, value, 0.0]))
    assert found == [[-1.0] * 3] * SITES
    names = {each.sites._name for each in made}
    assert any(f"the parameter frozen, which {name} has unfrozen, stays frozen" in caplog.text for name in names)


def test_one_with_usual_numbers_joins_from_these(rounds):
    assert averaged([rounds() for _ in range(SITES)], [1.0] * SITES, unfrozen=torch.full((3,), 7.0)) == (
        [[-1.0] * 3 + [7.0] * 3] * SITES
    )


def test_a_parameter_that_is_unfrozen_without_finite_numbers_is_named_at_its_site(places):
    model = Net(0)
    model.first.requires_grad_(requires_grad=False)
    _, optimizer, local = built(0, places(1), model)
    with torch.no_grad():
        model.first.weight[0, 0] = torch.nan
    model.first.requires_grad_(requires_grad=True)
    with pytest.raises(ValueError, match=r"parameter first\.weight was unfrozen and has values that are not finite"):
        descend(model, optimizer, 0, 0)
    local.close()


OWN = kernel_offer({"quantize_blocks"}, CPU)
FORGED = "2\n2026 WARNING all is well\x1b[31m"


def changed(part):
    """Every form of a part of an offer with one field absent, added, or of another type or with a forged text."""
    match part:
        case dict():
            yield {**part, "other": "more"}
            for key in part:
                yield {each: value for each, value in part.items() if each != key}
                for value in changed(part[key]):
                    yield {**part, key: value}
        case list():
            yield from ([], [3], [*part, FORGED])
        case str():
            yield FORGED
    yield from (wrong for wrong in (None, 3, "text", [], {}, True) if type(wrong) is not type(part))


MALFORMED = [b"?", b"[]", *map(written, filter(lambda each: isinstance(each, dict), changed(OWN)))]


@pytest.mark.parametrize("text", [*MALFORMED, written({**OWN, "offers": {"quantize_blocks": ["of another planet"]}})])
def test_an_offer_of_kernels_that_cannot_be_counts_as_the_reference(text, caplog):
    first, second = checked_offers([written(OWN), text], ["site 0", "site 1"], OWN)
    assert first == OWN
    assert second == {**OWN, "offers": {"quantize_blocks": ["reference"]}}
    follow_kernels([first, second], 0, CPU)
    assert "operations run on the kernel backend that every site has: the kernels of site 1" in caplog.text
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_where_a_backend_is_requested_a_malformed_offer_counts_as_that_one():
    own = {**OWN, "offers": {"quantize_blocks": ["native"]}, "by": "GRADWIRE_KERNELS"}
    assert checked_offers([b"{}"], ["site 1"], own) == [{**own, "by": ""}]


def test_sites_go_on_with_a_member_whose_offer_of_kernels_cannot_be(places, monkeypatch):
    made = [places(2) for _ in range(2)]
    for each in made:
        each.join("alike", {"quantize_blocks"})
    bad = made[1]._kernels
    monkeypatch.setattr(client, "written", lambda record: b'{"offers": 3}' if record is bad else written(record))
    meetings = together(2, lambda site: made[site].meet())
    assert together(2, lambda site: meetings[site].tell([5])) == [[[5], [5]]] * 2


def buffers_after(made, given):
    """The buffers of all sites after a round to which they give these, of sites that began with a one, a zero and a mask."""
    together(SITES, lambda site: made[site].begin(None, None).result())
    together(SITES, lambda site: made[site].begin(torch.ones(3), torch.tensor(given[site])).result())
    return [each.buffers.tolist() for each in made]


@pytest.mark.parametrize("outliers", ["clip", "drop"])
@pytest.mark.parametrize("fault", [1e30, -1e30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("change", [0.5, 0.0])
def test_a_sites_faulty_buffers_move_the_others_by_three_times_their_change_at_most(rounds, outliers, fault, change):
    made = [rounds(outliers, torch.tensor([1.0, 0.0, -math.inf])) for _ in range(SITES)]
    honest = [1.0 + change, 0.0, -math.inf]
    (found, *others) = buffers_after(made, [honest] * 3 + [[1.0, fault, -math.inf]])
    assert others == [found] * 3
    assert found[0] == pytest.approx(1 + 0.75 * change)
    assert abs(found[1]) <= 0.75 * change * (1 + 1e-6)
    assert found[2] == -math.inf


@pytest.mark.parametrize("outliers", ["clip", "drop"])
def test_buffers_that_move_more_than_a_site_reports_move_the_others_by_the_reports_at_most(
    rounds, monkeypatch, outliers
):
    made = [rounds(outliers, torch.zeros(1)) for _ in range(SITES)]
    made[FAULTY].drift = lambda buffers: 1e-3
    within = rounds_file.within
    monkeypatch.setattr(rounds_file, "within", lambda here, *rest: here if here.max() > 9e29 else within(here, *rest))
    (found, *others) = buffers_after(made, [[1.0]] * 3 + [[1e30]])
    assert others == [found] * 3
    assert abs(found[0]) <= (3 * 1.0 + 3.0) / SITES


def test_buffers_of_honest_sites_have_their_mean_where_they_are_limited(rounds):
    made = [rounds("clip", torch.zeros(2)) for _ in range(SITES)]
    found = buffers_after(made, [[1.0, 0.0], [2.0, -1.0], [3.0, 1.0], [2.0, 4.0]])
    assert found == [[2.0, 1.0]] * SITES
