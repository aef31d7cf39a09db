"""What the pages claim: their sentences with figures, and their tables."""

from collections.abc import Mapping
from pathlib import Path

from claims import losses, predicted, settings, speeds, tables
from claims.claim import MEASURED, PREDICTED, Claim
from claims.render import Page

SENTENCES = Path(__file__).with_name("sentences.txt")
NAMES = (
    "README.md",
    "docs/choosing.md",
    "docs/muon.md",
    "docs/should-i-compress.md",
    "docs/promises.md",
    "docs/fsdp.md",
    "docs/gpus-without-nvlink.md",
    "docs/alternatives.md",
    "docs/local-steps.md",
    "docs/local-steps-explained.md",
)


def all_claims() -> dict[str, Claim]:
    """Return all claims by name."""
    found = [*losses.claims(), *speeds.claims(), *settings.claims(), *predicted.claims()]
    claims = {each.name: each for each in found}
    if len(claims) != len(found):
        raise ValueError("two claims have one name")
    return claims


def sentences() -> dict[str, list[str]]:
    """Return the sentences with figures of each page."""
    _, *parts = SENTENCES.read_text("utf-8").split("\n# ")
    pages = (part.strip().split("\n\n") for part in parts)
    return {name.strip(): [" ".join(each.split()) for each in found] for name, *found in pages}


def all_pages(claims: Mapping[str, Claim]) -> dict[str, Page]:
    """Return the sentences and tables of each page."""
    generated = {
        "README.md": [
            *(tables.networks(claims, kind) for kind in (MEASURED, PREDICTED)),
            tables.losses(claims, [losses.ADAMW], tables.ONE_ANSWER),
        ],
        "docs/choosing.md": [tables.losses(claims, losses.OPTIMIZERS), tables.machines(claims)],
        "docs/fsdp.md": [tables.of_fsdp(claims)],
        "docs/gpus-without-nvlink.md": [tables.of_reports(claims)],
    }
    return {name: Page(sentences().get(name, ()), generated.get(name, ())) for name in NAMES}
