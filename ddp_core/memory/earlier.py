"""States of earlier formats: what their specifications left to defaults that have changed since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...compress import compressor, specification
from ...compress.build import parsed

OF_FORMAT_1: dict[str, dict[str, Any]] = {  # {method: {option: its default then}}
    "onebit": {"rotate": False},
    "adaptive": {"ladder": "none/int8/int4/ternary", "target": 0.95},
}
NESTED = ("inner", "warmup")  # options that are specifications


def brought_up_to_date(saved: Mapping[str, Any], now: int) -> Mapping[str, Any]:
    """A state of format 1 as one of format `now`: its specification says what it left to the defaults of then.

    Any other is returned as it is.
    """
    if type(saved["gradwire"]) is not int or saved["gradwire"] != 1:
        return saved
    return {**saved, "gradwire": now, "spec": _in_words_of_today(saved.get("spec"))}


def _in_words_of_today(spec: Any) -> Any:
    try:
        return specification(compressor(_filled(spec))) if isinstance(spec, str) else spec
    except ValueError:  # of a compressor that no string builds
        return spec


def _filled(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """A specification with the defaults of then, also in what it nests."""
    given = dict(parsed(spec) if isinstance(spec, str) else spec)
    nested = {option: _filled(given[option]) for option in NESTED if option in given}
    return {**OF_FORMAT_1.get(given["name"], {}), **given, **nested}
