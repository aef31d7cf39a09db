"""A slow link without root, by its rate alone (lab/ has latency and loss): collectives are held back as it would."""

from __future__ import annotations

import re
from functools import partial

from ...ddp_core import Decorator, Link, Paced

BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
NUMBER = r"(?P<number>\d+(\.\d*)?|\.\d+)"
RATE = re.compile(NUMBER + r" ?(?P<prefix>[kmgt]i?)?bit(/s)?", re.IGNORECASE)
AMBIGUOUS = re.compile(NUMBER + r" ?(?P<prefix>[kmgt]i?)?(bps|b/s)", re.IGNORECASE)
BITS_PER_BYTE = 8
MBIT, GBIT = 1e6, 1e9
NO_LINK = "none"


def parse_rate(text: str) -> float:
    """Return the bytes a second of a rate in bits a second, such as 100mbit or 1.5 Gbit/s; 0 needs no unit.

    Prefixes are k, m, g, t (powers of 1000) and ki, mi, gi, ti (powers of 1024). Raises ValueError for a number without a
    unit, and for `bps`, which is bytes a second for tc and bits a second for most people.

    >>> parse_rate("100mbit"), parse_rate("1.5 Gbit/s"), parse_rate("10kibit"), parse_rate("0")
    (12500000.0, 187500000.0, 1280.0, 0.0)
    """
    given = text.strip()
    match = RATE.fullmatch(given)
    if match is None and given != "0":
        raise ValueError(_refused(given))
    return 0.0 if match is None else float(match["number"]) * BITS[(match["prefix"] or "").lower()] / BITS_PER_BYTE


def _refused(given: str) -> str:
    """Return the message for a text that is no rate, with the way to write one."""
    if match := AMBIGUOUS.fullmatch(given):
        number, prefix = match["number"], (match["prefix"] or "").lower()
        return (
            f"the rate {given!r} may mean bits or bytes a second: write {number}{prefix}bit for bits a second, or "
            f"{float(number) * BITS_PER_BYTE:g}{prefix}bit for bytes a second"
        )
    if re.fullmatch(NUMBER, given):
        return (
            f"the rate {given!r} has no unit: write {given}mbit for Mbit/s or {given}gbit for Gbit/s, such as 100mbit"
        )
    return f"a rate is a number and a unit of bits a second, such as 100mbit, 1.5gbit or 64kbit, got {given!r}"


def shown_rate(text: str) -> str:
    """Return a rate as all output shows it, in Mbit/s or Gbit/s.

    >>> shown_rate("100mbit"), shown_rate("10000mbit"), shown_rate("64kbit")
    ('100 Mbit/s', '10 Gbit/s', '0.064 Mbit/s')
    """
    bits = parse_rate(text) * BITS_PER_BYTE
    return f"{bits / GBIT:.6g} Gbit/s" if bits >= GBIT else f"{bits / MBIT:.6g} Mbit/s"


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
    """Return a wrapper of transports that delays gradwire's messages as a link of this rate would.

    Every rank has one link, which carries the bytes that it sends one collective after the other, in the order started;
    no latency is added, and what really travels takes its own time beside it. None is no link. For process groups whose
    wait blocks the host, such as Gloo.
    """
    check_link(link)
    return None if link is None else partial(Paced, link=Link(parse_rate(link)))
