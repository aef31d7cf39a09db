"""The standing of sites, by training and round: a majority sets the model, others take it or are refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

IDENTITY = re.compile("[0-3][0-9a-f]{15}")  # of a training: a number of 62 bits
NEW = -1  # the round of a site that has not been in any


def is_identity(text: str) -> bool:
    """Return True for the identity of a training, and for the empty text of a site that has none."""
    return not text or bool(IDENTITY.fullmatch(text))


@dataclass(frozen=True)
class Claim:
    """A site's standing by its own words. `training`: its identity, empty before the first round; `round`: finished ones."""

    training: str = ""
    round: int = NEW


@dataclass(frozen=True)
class Verdict:
    """The training of a meeting, empty where nobody is in one yet, and its round. `refused`: sites, each with the reason."""

    training: str
    round: int
    refused: dict[str, str] = field(default_factory=dict)


def judge(claims: Mapping[str, Claim], incumbents: Collection[str], known: str, apart: Collection[str] = ()) -> Verdict:
    """Decide by majority which training and round a meeting has.

    `incumbents`: sites of the last meeting. They alone vote where any of them is there: a site that comes back or is new
    cannot bring another model. `known`: the training of the last meeting, which wins a tie. The round is the upper median
    of the voters' rounds. A site of another training is refused, and one that is more than a round ahead: a single round
    may have succeeded at some sites alone. `apart`: sites that went on without the majority. They take its model, and are
    not refused.
    """
    bound = {site: claim for site, claim in claims.items() if claim.training}
    voters = {site: claim for site, claim in bound.items() if site in incumbents} or bound
    votes = Counter(claim.training for claim in voters.values())
    first = [training for training, count in votes.items() if count == max(votes.values())]
    if len(first) > 1 and known not in first:
        reason = f"the sites are of different trainings, {' and '.join(sorted(first))}, and none has a majority"
        return Verdict("", NEW, dict.fromkeys(claims, f"{reason}: start them from checkpoints of one training"))
    training = known if known in first or not first else first[0]
    rounds = sorted(claim.round for claim in voters.values() if claim.training == training)
    agreed = rounds[len(rounds) // 2] if rounds else max((claim.round for claim in claims.values()), default=NEW)
    refused = {}
    for site, claim in bound.items():
        if claim.training != training:
            refused[site] = f"it is of training {claim.training}, the others are of {training}"
        elif claim.round > agreed + 1 and site not in apart:
            refused[site] = f"it is at round {claim.round}, where the others are at {agreed}"
    return Verdict(training, agreed, refused)
