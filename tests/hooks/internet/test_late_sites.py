"""Who sets the model in a meeting, and who is refused: by cases that are written down."""

import pytest

from gradwire.hooks.internet.late_sites import NEW, Claim, judge

OURS, OTHER = "0" * 15 + "a", "0" * 15 + "b"


def judged(claims, incumbents="", known=""):
    """The training, the round and the refused sites. `claims`: {site: (training, round)}; a site has one letter."""
    verdict = judge({site: Claim(*claim) for site, claim in claims.items()}, set(incumbents), known)
    return verdict.training, verdict.round, sorted(verdict.refused)


@pytest.mark.parametrize(
    ("claims", "incumbents", "known", "expected"),
    [
        ({"a": ("", NEW), "b": ("", NEW)}, "", "", ("", NEW, [])),  # the very start
        ({"a": ("", 0), "b": ("", NEW)}, "a", OURS, (OURS, 0, [])),
        ({"a": (OURS, 5), "b": (OURS, 4)}, "ab", OURS, (OURS, 5, [])),  # of two the one that is further
        ({"a": (OURS, 5), "b": (OURS, 5), "c": (OURS, 6)}, "abc", OURS, (OURS, 5, [])),  # a round failed elsewhere
        ({"a": (OURS, 5), "b": (OURS, 5), "c": (OURS, 7)}, "abc", OURS, (OURS, 5, ["c"])),
        ({"a": (OURS, 5), "b": (OURS, 9), "c": (OURS, 9)}, "a", OURS, (OURS, 5, ["b", "c"])),  # one was there
        ({"a": (OURS, 9), "b": (OURS, 5), "c": (OURS, 5)}, "a", OURS, (OURS, 9, [])),  # it went on alone
        ({"a": (OURS, 5), "b": (OTHER, 900)}, "a", OURS, (OURS, 5, ["b"])),  # an old checkpoint of another training
        ({"a": (OURS, 5), "b": (OTHER, 900)}, "ab", OURS, (OURS, 5, ["b"])),  # loaded in mid-training
        ({"a": (OTHER, 40), "b": (OTHER, 40), "c": ("", 0)}, "abc", OURS, (OTHER, 40, [])),  # one has no checkpoint
        ({"a": (OTHER, 40), "b": (OTHER, 48)}, "ab", OURS, (OTHER, 48, [])),  # checkpoints of different moments
        ({"a": (OURS, 5), "b": (OTHER, 9)}, "", "", ("", NEW, ["a", "b"])),
        ({}, "", "", ("", NEW, [])),
    ],
)
def test_the_majority_of_those_who_were_there_decides(claims, incumbents, known, expected):
    assert judged(claims, incumbents, known) == expected
