"""The messages between sites and their rendezvous: JSON, of which every field is checked before it is used.

Texts are printable. They get into other sites' logs, where a line break or an escape sequence would forge lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T", str, int, float, list[Any])
BYTES = 1 << 18  # of a message at most
TEXT = 1 << 14  # characters of a text in it
NAME = 200  # characters of a name at most
SHOWN = 80  # characters of a wrong value in an error
TEXTS = ("id", "name", "link", "host")  # of a site


class BadRecord(RuntimeError):
    """A message lacks a field, or has one that it cannot have."""


@dataclass(frozen=True)
class Site:
    """A site as others see it. `link`: the name of the connections that it holds from earlier meetings.

    `host`, `port`: where others reach it. `port` 0: it only dials out, to a relay.
    """

    id: str
    name: str
    link: str
    host: str
    port: int

    @property
    def seen(self) -> dict[str, Any]:
        """The fields that other sites learn."""
        return {key: getattr(self, key) for key in (*TEXTS, "port")}


def written(record: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message."""
    return json.dumps(record).encode()


def read(text: bytes, what: str) -> dict[str, Any]:
    """Return a message. `what`: it is, for errors. Raises BadRecord for bytes that are none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{what} is not JSON: {_shown(text)}") from error
    if not isinstance(record, dict):
        raise BadRecord(f"{what} is a JSON object; got {_shown(record)}")
    return record


def field(record: Mapping[str, Any], key: str, kind: type[T], what: str) -> T:
    """Return a field of a message. Raises BadRecord where it is absent, or of another type or size than it can be."""
    value = record.get(key)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1 << 53 else math.inf
    good = isinstance(value, kind) and not isinstance(value, bool)
    if isinstance(value, str):
        good = good and is_text(value)
    elif isinstance(value, float):
        good = good and math.isfinite(value) and value >= 0
    elif isinstance(value, int):
        good = good and -1 <= value < 1 << 62
    if not good:
        printable = ", of printable characters" if kind is str else ""
        raise BadRecord(f"{what} has a field {key!r} of type {kind.__name__}{printable}; got {_shown(value)}")
    return cast(T, value)


def site_of(record: Mapping[str, Any], what: str) -> Site:
    """Return the site of a message. Raises BadRecord."""
    site, name, link, host = (field(record, key, str, what) for key in TEXTS)
    return Site(site, name, link, host, field(record, "port", int, what))


def is_text(value: object) -> bool:
    """Return True for a text that a message may have."""
    return isinstance(value, str) and len(value) <= TEXT and value.isprintable()


def checked_name(what: str, given: str) -> str:
    """Return a name that a user gives. Raises ValueError for one that others refuse. `what` it names, for the error."""
    if not isinstance(given, str) or not given or not given.isprintable() or len(given) > NAME:
        raise ValueError(
            f"{what} is a text of 1 to {NAME} printable characters in one line, since other sites log it; got {given!r}"
        )
    return given


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
