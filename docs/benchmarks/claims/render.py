"""Rendered sentences and tables on pages: found, compared, and written anew."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from claims.claim import Claim

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TIME = r"ms|us|µs|s|seconds?|min|minutes?|h|hours?|days?"
BYTES = r"[kMGT]i?B|bytes?"
FIGURE = re.compile(rf"(?<![\w.])[+-]?\d[\d.,]*(?:x|\s?%|\s?(?:{TIME}|{BYTES}))(?!\w)")
PLACE = re.compile(r"\{([^{}]+)\}")
NUMBER = r"[+-]?\d[\d.,]*"
SHOWN = (  # a claim's text: words, or numbers and a unit
    rf"(?:no\s+difference\s+seen\s+\([^)]*\)|not\s+on\s+all\s+seeds(?:\s\(\d\s+seeds?\))?|not\s+measured|"
    rf"{NUMBER}x?(?:\s+(?:and|to|±)\s+{NUMBER}x?)*(?:\s?%|\s(?:{TIME}|{BYTES}|M)\b)?(?:\s\(\d\s+seeds?\))?)"
)


@dataclass(frozen=True)
class Page:
    """The sentences of a page, whose places in braces are names of claims, and its tables, which are generated whole."""

    sentences: Sequence[str] = ()
    tables: Sequence[str] = ()


def joined(text: str) -> str:
    """Return a text with single spaces, without blocks of code."""
    return " ".join(FENCE.sub(" ", text).split())


def rendered(sentence: str, claims: Mapping[str, Claim]) -> str:
    """Return a sentence with its figures."""
    return PLACE.sub(lambda place: claims[place[1]].text, sentence)


def problems(text: str, page: Page, claims: Mapping[str, Claim]) -> Iterator[str]:
    """Yield each sentence and table that a page lacks, and each figure that belongs to none of them."""
    text, covered = joined(text), set()
    for part in (*(rendered(each, claims) for each in page.sentences), *page.tables):
        part = joined(part)
        found = [match.start() for match in re.finditer(re.escape(part), text)]
        if not found:
            yield f"the page lacks: {part}"
        covered |= {place for start in found for place in range(start, start + len(part))}
    for match in FIGURE.finditer(text):
        if not covered.issuperset(range(match.start(), match.end())):
            yield f"a figure without a claim: {text[max(0, match.start() - 50) : match.end() + 30]}"


def written(text: str, page: Page, claims: Mapping[str, Claim]) -> str:
    """Return a page with today's figures in its sentences, and today's tables in place of those with the same head."""
    for sentence in page.sentences:
        literal = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in PLACE.split(sentence)[::2]]
        pattern = re.compile(f"({SHOWN})".join(literal))
        values = [claims[name].text for name in PLACE.findall(sentence)]
        if match := pattern.search(text):
            for place in reversed(range(len(values))):
                start, end = match.span(place + 1)
                text = text if joined(text[start:end]) == values[place] else text[:start] + values[place] + text[end:]
    for table in page.tables:
        head = table.partition("\n")[0]
        if head in text:
            start = text.index(head)
            text = text[:start] + table + text[text.index("\n\n", start) :]
    return text
