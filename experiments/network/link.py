"""A slow link without root: collectives are held back until the link would have carried them."""

from __future__ import annotations

import re
from functools import partial

from ...ddp_core import Decorator, Link, Paced

BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
RATE = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+)(?P<prefix>[kmgt]i?)?(?P<unit>bit|bps)?", re.IGNORECASE)
BITS_PER_BYTE = 8
NO_LINK = "none"


def parse_rate(text: str) -> float:
    """Bytes a second of a rate in tc's units: `bit` and its multiples are bits a second, `bps` bytes a second.

    Prefixes are k, m, g, t (powers of 1000) and ki, mi, gi, ti (powers of 1024); a bare number is bits a second.

    >>> parse_rate("100mbit"), parse_rate("1.5gbit"), parse_rate("10kibps"), parse_rate("8000")
    (12500000.0, 187500000.0, 10240.0, 1000.0)
    """
    match = RATE.fullmatch(text.strip())
    if match is None or (match["prefix"] and not match["unit"]):
        raise ValueError(f"a rate is a number and a unit of tc's, such as 100mbit, 1.5gbit or 12mbps, got {text!r}")
    amount = float(match["number"]) * BITS[(match["prefix"] or "").lower()]
    return amount if (match["unit"] or "").lower() == "bps" else amount / BITS_PER_BYTE


def check_link(link: str | None) -> None:
    """Raise ValueError for what is not the rate of a link; None is no emulated link."""
    if link is not None and not parse_rate(link) > 0:
        raise ValueError(f"a link's rate is above 0, such as 100mbit, got {link!r}; leave it out for no emulated link")


def links_of(text: str | None) -> tuple[str | None, ...]:
    """The links that an option names, one after the other; None stands for no emulated link, as does the word `none`.

    Raises ValueError for what is no rate and for a link that is named twice.

    >>> links_of("100mbit,none"), links_of(None)
    (('100mbit', None), (None,))
    """
    links = tuple(None if each == NO_LINK else each for each in map(str.strip, (text or NO_LINK).split(",")))
    for link in links:
        check_link(link)
    if len(set(links)) < len(links):
        raise ValueError(f"link names the same rate twice: {text!r}")
    return links


def over_link(link: str | None) -> Decorator | None:
    """What to put around a transport so that what gradwire sends takes at least the time that such a link would need.

    Every rank has one link, which carries the bytes that it sends one collective after the other, in the order started;
    no latency is added, and what really travels takes its own time beside it. None is no link. For process groups whose
    wait blocks the host, such as Gloo.
    """
    check_link(link)
    return None if link is None else partial(Paced, link=Link(parse_rate(link)))
