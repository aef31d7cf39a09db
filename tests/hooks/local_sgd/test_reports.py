"""What sites tell each other before a round, and the share in the average that follows from it."""

import math
from dataclasses import replace

import pytest
import torch

from gradwire.hooks.internet.late_sites import Claim
from gradwire.hooks.local_sgd.outliers import largest_average, shares_of
from gradwire.hooks.local_sgd.reports import DIGEST, SiteReport

HERE = SiteReport(Claim("0" * 15 + "a", 7), True, DIGEST - 1, 2.5, 0.5, 16.0, 1.5, 99, [0, 2])


def travelled(report):
    """A report after its way through a tensor of whole numbers."""
    return SiteReport.of(torch.tensor([report.row])[0].tolist())


@pytest.mark.parametrize("norm", [0.0, 1e-300, 3.5, 1e300])
def test_a_report_arrives_as_it_was(norm):
    assert travelled(replace(HERE, norm=norm)) == replace(HERE, norm=norm)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_site_whose_weight_is_none_gives_nothing(weight):
    assert not travelled(replace(HERE, weight=weight)).able


@pytest.mark.parametrize("number", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("field", ["norm", "owed", "drift"])
def test_a_site_whose_norms_cannot_be_gives_nothing(field, number):
    assert not travelled(replace(HERE, **{field: number})).able


def test_a_weight_far_above_the_others_counts_as_three_times_their_median_where_outliers_are_limited():
    reports = [replace(HERE, weight=weight) for weight in (1.0, 1.0, 2.0, 1e30)]
    assert shares_of(reports, [True] * 4, "clip")[0] == pytest.approx([4 / 7, 4 / 7, 8 / 7, 12 / 7])
    assert shares_of(reports, [True] * 4, "keep")[0][3] == pytest.approx(4.0)


def test_an_average_is_bounded_by_what_sites_report_where_outliers_are_limited():
    reports = [replace(HERE, norm=norm, owed=owed) for norm, owed in ((1.0, 0.5), (2.0, 0.5), (1e-3, 1e30), (3.0, 0.5))]
    for outliers, most in (("keep", math.inf), ("drop", 10 * ((1 + 2 + 1e-3 + 3) / 4 + (3 * 0.5 + 3 * 0.5) / 4))):
        assert largest_average(reports, [1.0] * 4, [1.0] * 4, outliers) == pytest.approx(most)


def test_shares_are_by_weight_among_those_that_count_and_less_for_an_outlier():
    norms, weights = [1.0, 1.0, 1.0, 10.0, 1.0], [1.0, 3.0, 2.0, 2.0, 50.0]
    reports = [replace(HERE, norm=norm, weight=weight) for norm, weight in zip(norms, weights, strict=True)]
    counted = [True] * 4 + [False]
    assert shares_of(reports, counted, "clip") == ([0.625, 1.875, 1.25, 1.25, 0.0], [1.0, 1.0, 1.0, 0.1, 1.0])
    shares, clipped = shares_of(reports, counted, "drop")
    assert shares == pytest.approx([5 / 6, 5 / 2, 5 / 3, 0.0, 0.0])
    assert clipped == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert shares_of(reports, [False] * 5, "keep") == ([0.0] * 5, [1.0] * 5)
