"""The kernel backends that the sites of a meeting offer: checked, before this site follows them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .records import BadRecord, is_text, read

logger = logging.getLogger(__name__)
REFERENCE = "reference"  # the backend that every site has


def checked_offers(texts: Sequence[bytes], names: Sequence[str], own: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the offers of the sites with these names, of the same operations as this site's own one.

    A site that sends what cannot be an offer counts as one that has the reference alone, and is named in a warning.
    """
    found: list[Mapping[str, Any]] = []
    for text, name in zip(texts, names, strict=True):
        try:
            found.append(_checked(read(text, f"the kernels of {name}"), own, name))
        except BadRecord as error:
            logger.warning("operations run on the kernel backend %s: %s", REFERENCE, error)
            found.append({**own, "offers": {each: [REFERENCE] for each in own["offers"]}, "by": ""})
    return found


def _checked(record: dict[str, Any], own: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    offers, versions = record.get("offers"), record.get("versions")
    good = (
        isinstance(offers, dict)
        and offers.keys() == own["offers"].keys()
        and all(isinstance(each, list) and each and all(map(is_text, each)) for each in offers.values())
        and isinstance(versions, dict)
        and versions.keys() == own["versions"].keys()
        and all(map(is_text, versions.values()))
        and is_text(record.get("by"))
    )
    if not good:
        raise BadRecord(
            f"the kernels of {name} are offers of backends for {', '.join(own['offers']) or 'no operation'}, versions of "
            f"{', '.join(own['versions'])}, and a reason; got the fields {', '.join(map(repr, sorted(record)))[:80]}"
        )
    return record
