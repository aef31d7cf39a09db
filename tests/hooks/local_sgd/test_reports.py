"""What sites tell each other before a round, and the share in the average that follows from it."""

import math
from dataclasses import replace

import pytest
import torch

from gradwire.hooks.local_sgd.reports import DIGEST, Report, shares_of

HERE = Report(7, True, "0" * 15 + "a", DIGEST - 1, 2.5, 16.0, 99, [0, 2])


def travelled(report):
    """A report after its way through a tensor of whole numbers."""
    return Report.of(torch.tensor([report.row])[0].tolist())


@pytest.mark.parametrize("norm", [0.0, 1e-300, 3.5, 1e300, math.inf])
def test_a_report_arrives_as_it_was(norm):
    assert travelled(replace(HERE, norm=norm)) == replace(HERE, norm=norm)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_site_whose_weight_is_none_gives_nothing(weight):
    assert not travelled(replace(HERE, weight=weight)).able


def test_shares_are_by_weight_among_those_that_count_and_less_for_an_outlier():
    norms, weights = [1.0, 1.0, 1.0, 10.0, 1.0], [1.0, 3.0, 2.0, 2.0, 50.0]
    reports = [replace(HERE, norm=norm, weight=weight) for norm, weight in zip(norms, weights, strict=True)]
    counted = [True] * 4 + [False]
    assert shares_of(reports, counted, "clip") == ([0.625, 1.875, 1.25, 1.25, 0.0], [1.0, 1.0, 1.0, 0.1, 1.0])
    shares, clipped = shares_of(reports, counted, "drop")
    assert shares == pytest.approx([5 / 6, 5 / 2, 5 / 3, 0.0, 0.0])
    assert clipped == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert shares_of(reports, [False] * 5, "keep") == ([0.0] * 5, [1.0] * 5)
