"""The grammar of compressors: `name`, `name:key=value,key=value`, `outer+inner:...`.

A mapping says the same and nests freely: `{"name": "powersgd", "rank": 4, "warmup": {"name": "bf16"}}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

OUTER_END = re.compile(r"(?<![0-9][eE])\+")  # a '+' that is not part of a number such as 1e+3
NESTED = ("inner", "warmup")  # options that are specifications
DEEPEST = 16  # compressors inside each other


def parsed(text: str) -> Mapping[str, Any]:
    """`outer+inner:key=value` as nested mappings. Raises ValueError for what cannot be read."""
    if (count := len(OUTER_END.findall(text)) + 1) > DEEPEST:
        raise ValueError(
            f"a compressor has at most {DEEPEST} parts with a '+' between them, got {count}: {text[:60]}..."
        )
    plus = OUTER_END.search(text)
    outer, inner = (text[: plus.start()], text[plus.end() :]) if plus else (text, "")
    name, colon, options = outer.strip().partition(":")
    if not name or (colon and not options) or (plus and not inner.strip()):
        raise ValueError(
            f"cannot read the compressor {text!r}: write name, name:key=value,key=value or outer+inner:..."
        )
    mapping: dict[str, Any] = {"name": name, **({"inner": parsed(inner)} if plus else {})}
    for option in options.split(",") if options else ():
        key, equals, value = option.partition("=")
        if not equals or not value:
            raise ValueError(f"cannot read the option {option!r} of {text!r}: write key=value")
        if key.strip() in mapping:
            raise ValueError(f"the option {key.strip()!r} stands twice in {text!r}")
        mapping[key.strip()] = value.strip()
    return mapping


def filled(spec: str | Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A specification with defaults, {method: {option: value}}, where it leaves them open; also in what it nests.

    >>> filled("bf16+powersgd:rank=2", {"powersgd": {"rank": 4, "feedback": 0.9}})
    {'name': 'bf16', 'inner': {'rank': '2', 'feedback': 0.9, 'name': 'powersgd'}}
    """
    check_depth(spec)
    given = dict(parsed(spec) if isinstance(spec, str) else spec)
    nested = {key: filled(given[key], defaults) for key in NESTED if isinstance(given.get(key), str | Mapping)}
    return {**defaults.get(given.get("name", ""), {}), **given, **nested}


def check_depth(spec: object) -> None:
    """Raise ValueError for mappings that are inside each other too often."""
    level = [spec]
    for _ in range(DEEPEST + 1):
        level = [each[key] for each in level if isinstance(each, Mapping) for key in NESTED if key in each]
    if level:
        raise ValueError(f"compressors are nested at most {DEEPEST} deep by {' and '.join(NESTED)}, got more")
