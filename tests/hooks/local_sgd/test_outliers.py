"""A faulty site among several: its differences are clipped to the others' norm or left out, and it is named."""

import itertools

import pytest
import torch

from gradwire import LocalSteps
from gradwire.hooks.local_sgd.outliers import factors, shares

from .sites import Net, descend, together

PLAIN = {"every": 2, "fragments": 1, "overlap": False, "outer": "sgd:lr=1,momentum=0", "compressor": "none"}
SITES, STEPS, FAULTY = 4, 20, 3


@pytest.mark.parametrize(
    ("norms", "clipped", "dropped"),
    [
        ([1.0, 1.0, 2.9], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ([2.0, 8.0, 4.0, 60.0], [1.0, 1.0, 1.0, 4 / 60], [1.0, 1.0, 1.0, 0.0]),
        ([1.0, 100.0], [1.0, 1.0], [1.0, 1.0]),  # nobody knows which of two is faulty
        ([0.0, 0.0, 5.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),  # the others have not moved: there is nothing to clip to
        ([], [], []),
    ],
)
def test_a_norm_above_three_times_the_median_of_the_others_is_clipped_or_dropped(norms, clipped, dropped):
    assert factors(norms, "clip") == pytest.approx(clipped)
    assert factors(norms, "drop") == dropped
    assert factors(norms, "keep") == [1.0] * len(norms)


@pytest.mark.parametrize("weights", [[1.0], [0.1] * 7, [1.0, 3.0], [5.0, 1e-3, 2.0]])
def test_the_mean_of_what_sites_give_times_their_shares_is_their_average_by_weight(weights):
    given = [float(place + 1) for place in range(len(weights))]
    mean = sum(share * each for share, each in zip(shares(weights), given, strict=True)) / len(weights)
    average = sum(weight * each for weight, each in zip(weights, given, strict=True)) / sum(weights)
    assert mean == pytest.approx(average, rel=1e-12)


def test_equal_weights_change_no_bit():
    assert shares([0.1] * 3) == [1.0] * 3


def losses(town, fault, outliers):
    """The mean loss of each site at the end, and who was named; the last site's differences go through `fault`."""
    prefix = f"{fault} {outliers} {next(NUMBERS)}"
    made = [town.meeting_place(SITES, f"site {site}", prefix=prefix) for site in range(SITES)]

    def run(site):
        model = Net(0, torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        local = LocalSteps(model, optimizer, at=made[site], outliers=outliers, **PLAIN)
        (part,) = local._parts
        if site == FAULTY and fault is not None:
            honest = part.capture
            part.capture = lambda: fault * honest()
        for step in range(STEPS):
            descend(model, optimizer, site, step)
        local.finish()
        inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(99)).double()
        with torch.no_grad():
            loss = (model.eval()(inputs) - inputs[:, :3] * 0.5).square().mean().item()
        return loss, {name for stats in local.history for name in stats.outliers}

    found = together(SITES, run)
    return found[0][0], set.union(*(named for _, named in found))


NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def honest(town):
    loss, named = losses(town, None, "clip")
    assert not named
    return loss


@pytest.mark.parametrize(("fault", "outliers"), [(1000.0, "clip"), (-10.0, "drop")])
def test_a_faulty_site_moves_the_loss_of_four_by_less_than_five_per_cent(town, honest, fault, outliers):
    loss, named = losses(town, fault, outliers)
    assert named == {f"site {FAULTY}"}
    assert loss < 1.05 * honest


@pytest.mark.parametrize(("fault", "found"), [(-10.0, {f"site {FAULTY}"}), (-1.0, set())])
def test_a_flipped_site_that_is_clipped_to_the_others_norm_costs_a_quarter_as_a_norm_shows_no_sign(
    town, honest, fault, found
):
    loss, named = losses(town, fault, "clip")
    assert named == found
    assert 1.05 * honest < loss < 1.3 * honest  # as docs/benchmarks/sites.md says


def test_a_flipped_site_that_is_kept_stops_the_others_from_learning(town, honest):
    kept, named = losses(town, -10.0, "keep")
    assert not named
    assert not kept < 10 * honest
