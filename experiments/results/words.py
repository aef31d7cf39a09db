"""Compressors in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ...compress.builder.build import parsed
from ...compress.protocol.registry import find

NAMES = {
    "acp-powersgd": "ACP-PowerSGD",
    "adacomp": "AdaComp",
    "batched-powersgd": "batched PowerSGD",
    "bf16": "16 bits (bf16)",
    "chunktopk": "chunk top-k",
    "dgc": "DGC",
    "fp16": "16 bits (fp16)",
    "int2": "2 bits",
    "int4": "4 bits",
    "int8": "8 bits",
    "none": "uncompressed",
    "onebit": "1 bit",
    "powersgd": "PowerSGD",
    "qsgd": "QSGD",
    "randomk": "random-k",
    "terngrad": "TernGrad",
    "topk": "top-k",
}
OPTIONS = {
    "payload": "{} factors",
    "rotate": "rotation {}",
    "start_iter": "{} warm-up steps",
    "warmup_steps": "{} warm-up steps",
}
PERCENT = 100


def in_words(compressor: str) -> str:
    """Return a compressor in words; a text that is none stays as it is.

    >>> in_words("fp16+powersgd:rank=4,start_iter=20"), in_words("topk"), in_words("int8/int4")
    ('PowerSGD rank 4, 16 bits (fp16), 20 warm-up steps', 'top-k 1 %', '8 bits / 4 bits')
    """
    if "/" in compressor:
        return " / ".join(map(in_words, compressor.split("/")))
    try:
        options = dict(parsed(compressor))
    except ValueError:
        return compressor
    return ", ".join(_parts(options))


def filled_in(runs: Iterable[tuple[str, str | None]], optimizer: str) -> str:
    """Return a sentence about the options that suit an optimizer; nothing if no run has any.

    `runs`: a compressor as written, and as it trained if that differs.

    >>> filled_in([("int4", "int4:error_feedback=false"), ("int8", None)], "adamw")
    'As attach(..., optimizer=optimizer) does for adamw: int4 trains as int4:error_feedback=false.'
    """
    found = [f"{spec} trains as {tuned}" for spec, tuned in dict(runs).items() if tuned]
    return f"As attach(..., optimizer=optimizer) does for {optimizer}: {', '.join(found)}." if found else ""


def _parts(options: dict[str, Any]) -> Iterator[str]:
    """Yield the name with the option that belongs to it, then the wrapper, then the other options."""
    name, inner = options.pop("name"), options.pop("inner", None)
    if inner is not None:
        first, *others = _parts(dict(inner))
        yield from (first, NAMES.get(name, name), *others)
        return
    method = find(name)
    known = {} if method is None else {option: default for option, (_, default) in method.options.items()}
    size = {key: options.pop(key, known.get(key)) for key in ("rank", "ratio")}
    text = NAMES.get(name, name)
    text += f" rank {size['rank']}" if size["rank"] is not None else ""
    text += f" {PERCENT * float(size['ratio']):g} %" if size["ratio"] is not None else ""
    yield text
    for key, value in options.items():
        value = str(value).replace("int", "") + "-bit" if key == "payload" else value
        yield OPTIONS.get(key, key.replace("_", " ") + " {}").format(value)
