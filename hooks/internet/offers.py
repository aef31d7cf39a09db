"""The kernel backends that the sites of a meeting offer: checked, before this site follows them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ...kernels.dispatch import REFERENCE
from .records import SHOWN, BadRecord, is_text, read

logger = logging.getLogger(__name__)


def checked_offers(texts: Sequence[bytes], names: Sequence[str], own: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the offers of the sites with these names, of the same operations as this site's own one.

    A site that sends what cannot be an offer counts as one that has the last of this site's choices alone, and is named in a
    warning.
    """
    found: list[Mapping[str, Any]] = []
    for text, name in zip(texts, names, strict=True):
        try:
            found.append(_checked(read(text, f"the kernels of {name}"), own, name))
        except BadRecord as error:
            logger.warning("operations run on the kernel backend that every site has: %s", error)
            found.append({**own, "offers": {each: backends[-1:] for each, backends in own["offers"].items()}, "by": ""})
    return found


def _checked(record: dict[str, Any], own: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    asked = bool(own["by"])  # else every site has the reference
    if not _is_like(record, own) or not all(asked or REFERENCE in each for each in record["offers"].values()):
        raise BadRecord(
            f"the kernels of {name} are a message with the fields and the types of {json.dumps(own)}; got the "
            f"fields {', '.join(map(repr, sorted(record)))[:SHOWN]}"
        )
    return record


def _is_like(given: Any, own: Any) -> bool:
    """Return True for the fields and types of a part of this site's own offer."""
    match own:
        case dict():
            fits = isinstance(given, dict) and given.keys() == own.keys()
            return fits and all(_is_like(given[key], own[key]) for key in own)
        case list():
            return isinstance(given, list) and bool(given) and all(map(is_text, given))
        case bool():
            return isinstance(given, bool)
    return is_text(given)
