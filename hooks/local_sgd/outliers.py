"""The share that each site's difference has in the average: by its weight, and less where its norm is far above others'.

A site reports its norm and its weight itself, so the others bound both by the median of theirs, and measure the average.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

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
