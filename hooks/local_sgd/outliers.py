"""Sites whose differences are far above the others', and the share of each site in the average.

The share of a difference is by its site's weight, and less where its norm is far above others'. A site reports its norm and
its weight itself, so the others bound both by the median of theirs, and measure the average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from .reports import SiteReport

CHOICES = ("keep", "clip", "drop")
FAR = 3.0  # a norm is far above the median of the others' from this factor on
LEAST = 3  # sites: of two nobody knows which one is faulty
BEYOND = 10.0  # an average has no larger norm than this times the reported ones: compressors round, some upwards


def checked(choice: str) -> str:
    """Return the choice. Raises ValueError for one that there is not."""
    if choice not in CHOICES:
        raise ValueError(f"outliers is {', '.join(map(repr, CHOICES))}; got {choice!r}")
    return choice


def factors(norms: Sequence[float], choice: str) -> list[float]:
    """Return the factor for each site's difference, from the norms of all: 1, or less for a norm that is far above.

    >>> factors([1.0, 1.0, 100.0], "clip"), factors([1.0, 1.0, 100.0], "drop"), factors([1.0, 100.0], "drop")
    ([1.0, 1.0, 0.01], [1.0, 1.0, 0.0], [1.0, 1.0])
    """
    if choice == "keep" or len(norms) < LEAST:
        return [1.0] * len(norms)
    usual = [median([*norms[:place], *norms[place + 1 :]]) for place in range(len(norms))]
    far = [0 < FAR * others < norm for norm, others in zip(norms, usual, strict=True)]
    less = [others / norm if choice == "clip" and norm else 0.0 for norm, others in zip(norms, usual, strict=True)]
    return [each if outlying else 1.0 for outlying, each in zip(far, less, strict=True)]


def bounded(numbers: Sequence[float], choice: str) -> list[float]:
    """Return sites' own words, each at most FAR times the median of the others'.

    >>> bounded([1.0, 1.0, 1e30], "clip"), bounded([1.0, 1.0, 1e30], "keep")
    ([1.0, 1.0, 3.0], [1.0, 1.0, 1e+30])
    """
    if choice == "keep" or len(numbers) < LEAST:
        return list(numbers)
    others = [median([*numbers[:place], *numbers[place + 1 :]]) for place in range(len(numbers))]
    return [min(number, FAR * usual) for number, usual in zip(numbers, others, strict=True)]


def shares(weights: Sequence[float]) -> list[float]:
    """Return the factor for each site's difference, of which the mean is the average by these weights.

    >>> shares([1.0, 3.0]), shares([0.1, 0.1, 0.1])
    ([0.5, 1.5], [1.0, 1.0, 1.0])
    """
    if len(set(weights)) < 2:
        return [1.0] * len(weights)  # exactly
    usual = fmean(weights)
    return [weight / usual for weight in weights]


def shares_of(reports: Sequence[SiteReport], counted: Sequence[bool], outliers: str) -> tuple[list[float], list[float]]:
    """Return factors of the sites' differences: their shares in the mean over all sites, and those that clip differences.

    The share of a site that does not count is 0, and those of the others are larger for it. Residuals have no share: the
    mean over all sites brings out what they all hold back.
    """
    here = [place for place, counts in enumerate(counted) if counts]
    clipped = dict(zip(here, factors([reports[place].norm for place in here], outliers), strict=True))
    kept = [place for place in here if clipped[place] > 0]
    weights = bounded([reports[place].weight for place in kept], outliers)
    weighed = dict(zip(kept, shares(weights), strict=True))
    places, of_all = range(len(reports)), len(reports) / max(1, len(kept))
    return [of_all * weighed.get(place, 0.0) for place in places], [clipped.get(place, 1.0) for place in places]


def largest_average(
    reports: Sequence[SiteReport], shared: Sequence[float], clipped: Sequence[float], outliers: str
) -> float:
    """Return the largest norm that the average may have by the sites' own words; infinity where nobody bounds them.

    Each word is bounded by the others' first. So a site that sends more than it reports makes an average above it.
    """
    if outliers == "keep" or len(reports) < LEAST:
        return math.inf
    norms = [share * factor * each.norm for share, factor, each in zip(shared, clipped, reports, strict=True)]
    owed = bounded([each.owed if math.isfinite(each.owed) else 0.0 for each in reports], outliers)
    return BEYOND * (fmean(norm if math.isfinite(norm) else 0.0 for norm in norms) + fmean(owed))


def buffer_limits(reports: Sequence[SiteReport], shared: Sequence[float], outliers: str) -> list[float]:
    """Return the largest norm that the change of each site's buffers may have: infinity where nobody bounds it."""
    here = [place for place, share in enumerate(shared) if share]
    if outliers == "keep" or len(here) < LEAST:
        return [math.inf] * len(reports)
    limits = dict(zip(here, bounded([reports[place].drift for place in here], outliers), strict=True))
    return [limits.get(place, math.inf) for place in range(len(reports))]


def largest_change(shared: Sequence[float], limits: Sequence[float]) -> float:
    """Return the largest norm that the change of the buffers' mean may have by these limits."""
    return sum(share * most for share, most in zip(shared, limits, strict=True) if share) / len(limits)
