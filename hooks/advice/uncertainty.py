"""The uncertainty of a compressor's loss, from gradwire's studies."""

from __future__ import annotations

SEED = 0.5  # points: standard deviation over seeds of a compressor's distance to none, the median of study `quality`
LARGER = 0.9  # points: the largest change of that distance from study `quality` to `quality-long`


def uncertainty() -> str:
    """Return how much a compressor's distance to the loss of `none` tells, in two sentences."""
    return (
        f"In gradwire's studies of small GPTs, another seed changes a distance to none by {SEED} points (standard "
        f"deviation). A model and a training 3x as large change it by up to {LARGER} points."
    )
