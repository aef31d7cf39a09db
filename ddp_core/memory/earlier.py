"""States of earlier formats: what their specifications left to defaults that have changed since."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, TypeAlias

from ...compress import compressor, specification
from ...compress.builder.grammar import NESTED, filled, parsed
from ...compress.protocol.registry import registered

FEEDBACK = "feedback"  # an option of all methods: a compressor's repr has it around the method, and a ladder has one
Defaults: TypeAlias = dict[str, dict[str, Any]]  # {method: {option: its default then}}
BEFORE: dict[int, Defaults] = {  # by the format in which they changed
    2: {
        "onebit": {"rotate": False},
        "adaptive": {"ladder": "none/int8/int4/ternary", "target": 0.95},
    },
    3: {name: {FEEDBACK: 1.0} for name in ("onebit", "randomk", "chunktopk")},
}


def brought_up_to_date(saved: Mapping[str, Any], now: int) -> Mapping[str, Any]:
    """A state of an earlier format as one of format `now`: its specification says what it left to the defaults of then.

    Any other is returned as it is.
    """
    number, spec = saved["gradwire"], saved.get("spec")
    if type(number) is not int or not 1 <= number < now:
        return saved
    return {**saved, "gradwire": now, "spec": in_words_of_today(spec, number) if isinstance(spec, str) else spec}


def in_words_of_today(spec: str, number: int) -> str:
    """What a specification, or the repr of compressors that no string builds, meant in states of format `number`."""
    defaults = _defaults_of(number)
    try:
        return specification(compressor(_with_ladders(filled(spec, defaults), defaults)))
    except ValueError:  # of a compressor that no string builds
        return repr_of_today(spec, number)


def repr_of_today(fingerprint: str, number: int) -> str:
    """A repr of compressors, however nested, in which those that lack an option of today have it as it was then.

    >>> repr_of_today("Switch(starts=(0, 9), stages=(OneBit(block=64), Dense()))", 1)
    'Switch(starts=(0, 9), stages=(OneBit(block=64, rotate=False), Dense()))'
    """
    try:
        tree = ast.parse(fingerprint, mode="eval")
    except SyntaxError:  # of an object without such a repr
        return fingerprint
    then = {registered[name].factory.__name__: options for name, options in _defaults_of(number).items()}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            given = {FEEDBACK, *(keyword.arg for keyword in call.keywords)}
            options = then.get(ast.unparse(call.func), {}).items()
            call.keywords += [
                ast.keyword(option, ast.Constant(value)) for option, value in options if option not in given
            ]
    return ast.unparse(tree)


def _defaults_of(number: int) -> Defaults:
    """Of all methods whose defaults have changed since a format."""
    found: Defaults = {}
    for since in sorted(BEFORE, reverse=True):
        for method, options in BEFORE[since].items() if since > number else ():
            found[method] = {**found.get(method, {}), **options}
    return found


def _with_ladders(spec: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    """A specification whose ladders, also in what it nests, say what their methods left to these defaults."""
    nested = {option: _with_ladders(spec[option], defaults) for option in NESTED if option in spec}
    steps = str(spec.get("ladder", "")).split("/")
    ladder = {"ladder": "/".join(_step(step.strip(), defaults) for step in steps)} if "ladder" in spec else {}
    return {**spec, **nested, **ladder}


def _step(step: str, defaults: Defaults) -> str:
    """A method of a ladder; its feedback is the ladder's."""
    given = parsed(step)
    left = {key: value for key, value in defaults.get(given["name"], {}).items() if key not in {FEEDBACK, *given}}
    listed = ",".join(f"{key}={str(value).lower()}" for key, value in left.items())
    return f"{step}{',' if ':' in step else ':'}{listed}" if listed else step
