"""States of earlier formats: what their specifications left to defaults that have changed since."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from ...compress import compressor, specification
from ...compress.build import parsed
from ...compress.registry import registered

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
    if not isinstance(spec, str):
        return spec
    try:
        return specification(compressor(_filled(spec)))
    except ValueError:  # of a compressor that no string builds
        return with_options_of_then(spec)


def _filled(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """A specification with the defaults of then, also in what it nests."""
    given = dict(parsed(spec) if isinstance(spec, str) else spec)
    nested = {option: _filled(given[option]) for option in NESTED if option in given}
    return {**OF_FORMAT_1.get(given["name"], {}), **given, **nested}


def with_options_of_then(fingerprint: str) -> str:
    """A repr of compressors, however nested, in which those that lack an option of today have it as it was then.

    >>> with_options_of_then("Switch(starts=(0, 9), stages=(OneBit(block=64), Dense()))")
    'Switch(starts=(0, 9), stages=(OneBit(block=64, rotate=False), Dense()))'
    """
    try:
        tree = ast.parse(fingerprint, mode="eval")
    except SyntaxError:  # of an object without such a repr
        return fingerprint
    then = {registered[name].factory.__name__: options for name, options in OF_FORMAT_1.items()}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            given = {keyword.arg for keyword in call.keywords}
            lacking = {
                option: value for option, value in then.get(ast.unparse(call.func), {}).items() if option not in given
            }
            call.keywords += [ast.keyword(option, ast.Constant(value)) for option, value in lacking.items()]
    return ast.unparse(tree)
