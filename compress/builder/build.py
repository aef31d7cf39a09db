"""Build a compressor from a text such as `"powersgd:rank=4,start_iter=1000"` or `"fp16+powersgd:rank=1"`.

The grammar: `name`, `name:key=value,key=value`, `outer+inner:...`. A mapping says the same and nests freely:
`{"name": "powersgd", "rank": 4, "warmup": {"name": "bf16"}}`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias

from torch import Tensor

from ..algorithms.adapters import TwoShot
from ..algorithms.core import Core
from ..algorithms.dense import Dense
from ..feedback.error_feedback import ErrorFeedback, Float32Arithmetic
from ..feedback.switch import Switch
from ..feedback.worker_momentum import WorkerMomentum
from ..protocol.compressor import Compressor, inside
from ..protocol.registry import BASELINES, Registration, find, register, registered
from ..state.leaf import WIDTHS
from .spelling import compressor_meant, option_value

WRITTEN = "_gradwire_text"  # the attribute of a compressor that was built from a text: that text
logger = logging.getLogger(__name__)
ENTRY_POINT_GROUP = "gradwire.compressors"
NO_SIGN = re.compile(r"[\w-]+\s*[\s,;(].+")  # a name such as "int4,error_feedback=0.9" or "hosts int8"
OUTER_END = re.compile(r"(?<![0-9][eE])\+")  # a '+' that is not part of a number such as 1e+3
WORD = re.compile(r"([\s,;:()+]*)((?:[^\s,;:()+]|(?<=[0-9][eE])\+)+)")  # and the signs before it
NESTED = ("inner", "warmup")  # options that are specifications
DEEPEST = 16  # compressors inside each other
Spec: TypeAlias = str | Mapping[str, Any] | Compressor


class UnknownCompressor(ValueError):
    """No compressor has this `name`. `known`: the names to choose from."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        super().__init__(f"unknown compressor {name!r}{compressor_meant(name, known)}; there are: {', '.join(known)}")


def compressors() -> dict[str, dict[str, Any]]:
    """Return all registered compressors, but for the baselines, which are imported when they are named.

    Returns:
        {name: {"summary": one line, "wraps": bool, "options": {option: default}}}

    >>> compressors()["topk"]["options"]["ratio"]
    0.01
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        _load_quietly(entry)
    return {
        name: {
            "summary": method.summary,
            "wraps": method.wraps,
            "options": {option: default for option, (_, default) in method.options.items()},
        }
        for name, method in sorted(registered.items())
        if name not in BASELINES
    }


def compressor(spec: Spec) -> Compressor:
    """Build a compressor.

    Args:
        spec: a string such as "powersgd:rank=4", a mapping such as {"name": "powersgd", "rank": 4}, or a compressor.

    Returns:
        The compressor; a compressor is returned as it is.

    Raises:
        ValueError: a name or an option is unknown, or a value is out of range. The message lists the allowed ones.
        TypeError: `spec` is of another kind.

    >>> compressor("fp16+acp-powersgd:rank=2,error_feedback=false")
    Float16(inner=Float32Arithmetic(inner=ACPPowerSGD(rank=2, min_compression_rate=2.0, seed=0)), sum='16bit')
    """
    if isinstance(spec, str):
        return _build(parsed(spec))
    if isinstance(spec, Mapping):
        check_depth(spec)
        return _build(spec)
    if isinstance(spec, Compressor) and not isinstance(spec, type):
        return spec
    raise TypeError(
        f"a compressor is given as a string, a mapping or an object with init and reduce, got {spec!r}: write 'int8', for "
        "example"
    )


def with_error_feedback(spec: Spec) -> Spec:
    """A specification for what the error feedback of another surrounds: all methods hold back all that they lack."""
    if not isinstance(spec, str | Mapping):
        return spec
    compressor(spec)  # imports what it names
    whole = {name: {"error_feedback": 1.0} for name, method in registered.items() if method.lossy}
    return filled(spec, whole)


def fingerprint(built: Compressor) -> str:
    """A compressor and all its options in words, the same in every process: sets are sorted, and no tensor has a device."""
    return re.sub(r" at 0x[0-9a-f]+", "", _in_words(built))


def _in_words(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        told = (
            f"{each.name}={_in_words(getattr(value, each.name))}" for each in fields(value) if each.repr and each.init
        )
        return f"{type(value).__qualname__}({', '.join(told)})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_in_words, value)))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_in_words, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_in_words(each)}' for key, each in value.items())}}}"
    return repr(value.cpu() if isinstance(value, Tensor) else value)


def specification(built: Compressor) -> str:
    """Return the shortest string that builds a compressor, or its fingerprint if it was not built from text.

    Args:
        built: the compressor.

    Returns:
        A text for `gradwire.compressor`.

    >>> specification(compressor({"name": "fp16", "inner": "powersgd:rank=4,start_iter=9"}))
    'fp16+powersgd:start_iter=9'
    """
    return written(built) or fingerprint(built)


@dataclass(frozen=True)
class WarmUp:
    """The first steps of a training with `start_iter`, `now` of which are done: `stage` is in use until step `until`."""

    stage: Compressor
    until: int
    now: int

    @property
    def steps_left(self) -> int:
        """Synchronized steps before the next stage begins."""
        return self.until - self.now

    def __str__(self) -> str:
        what = "uncompressed" if self.stage == Dense() else specification(self.stage)
        return f"warm-up: {what} until step {self.until} (now {self.now})"


def warm_up(built: Compressor, step: int) -> WarmUp | None:
    """Return the warm-up that a training is in after `step` synchronized steps; None if there is none, or it is over.

    >>> str(warm_up(compressor("powersgd:start_iter=1000"), 61))
    'warm-up: uncompressed until step 1000 (now 61)'
    """
    for switch in inside(built):
        if isinstance(switch, Switch) and step < switch.starts[-1]:
            until = min(start for start in switch.starts if step < start)
            return WarmUp(switch.stages[switch.starts.index(until) - 1], until, step)
    return None


@dataclass(frozen=True)
class Wrapping:
    """The wrappers that options of all compressors put around one; `error_feedback`: the part of a residual that is kept."""

    method: Registration
    error_feedback: float
    residual_bits: int = WIDTHS[0]
    momentum: float = 0.0
    start_iter: int | None = None
    warmup: Spec | None = None

    def __post_init__(self) -> None:
        name, kept, bits = self.method.name, self.error_feedback, self.residual_bits
        if not 0 <= kept <= 1:
            raise ValueError(
                f"{name}:error_feedback is true, false or from 0 (none) to 1 (all of the residual), got {kept}"
            )
        if bits not in WIDTHS:
            raise ValueError(f"{name}:residual_bits is {', '.join(map(str, WIDTHS[:-1]))} or {WIDTHS[-1]}, got {bits}")
        if bits != WIDTHS[0] and not kept:
            raise ValueError(
                f"{name}:residual_bits={bits} needs error feedback, which is off: add error_feedback=true, or leave it out"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"{name}:momentum is at least 0 (none) and below 1, got {self.momentum}")
        if self.start_iter is None and self.warmup is not None:
            raise ValueError(f"{name}:warmup needs start_iter, the number of steps that it lasts")
        if self.start_iter is not None and self.start_iter < 0:
            raise ValueError(f"{name}:start_iter is at least 0, got {self.start_iter}")

    def around(self, core: Compressor) -> Compressor:
        """Return a compressor with what surrounds it, innermost first: warm-up, float32, error feedback, momentum."""
        core, before = self._served(core), self._before()
        core = Switch({0: before, self.start_iter: core}) if self.start_iter else core  # 0: no warm-up
        if not self.method.lossy:
            return core
        built: Compressor = Float32Arithmetic(core)
        built = ErrorFeedback(built, self.residual_bits, self.error_feedback) if self.error_feedback else built
        return WorkerMomentum(built, self.momentum) if self.momentum else built

    def _served(self, built: Compressor) -> Compressor:
        """The compressor with residuals on servers as on workers, if it has servers."""
        if isinstance(built, TwoShot):
            return dataclasses.replace(built, error_feedback=self.error_feedback > 0, residual_bits=self.residual_bits)
        if isinstance(built, Core):
            return dataclasses.replace(built, rest=self._served(built.rest))
        return Float32Arithmetic(self._served(built.inner)) if isinstance(built, Float32Arithmetic) else built

    def _before(self) -> Compressor:
        """The compressor of the first steps, in the error feedback of those after it: one residual is enough for both."""
        if self.warmup is None:
            return Dense()
        alone = compressor(self.warmup)
        if not self.error_feedback:
            return alone
        fed_back: Any = compressor(with_error_feedback(self.warmup))
        inner = fed_back.inner if isinstance(fed_back, ErrorFeedback) and fed_back.kept == 1 else fed_back
        return _with_text(self._served(inner), written(alone))


def _build(mapping: Mapping[str, Any]) -> Compressor:
    options = dict(mapping)
    method = _find(options.pop("name", None), mapping)
    inner = options.pop("inner", None)
    if inner is not None and not method.wraps:
        wrappers = ", ".join(sorted(name for name, other in registered.items() if other.wraps))
        raise ValueError(f"{method.name!r} wraps nothing; left of a '+' may stand: {wrappers}")
    values = {key: option_value(method, key, value) for key, value in options.items()}
    own = {key: value for key, value in values.items() if key not in method.shared}
    shared = {key: value for key, value in values.items() if key in method.shared}
    shared["error_feedback"] = _kept(method, shared.get("error_feedback"))
    nested = {} if inner is None else {"inner": compressor(inner)}
    wrapping, built = Wrapping(method, **shared), method.factory(**own, **nested)
    built = wrapping.around(method.adapter(built) if method.adapter else built)
    return _with_text(built, _text(method, {**shared, **own}, nested))


def _kept(method: Registration, given: float | bool | None) -> float:
    """Return the part of a residual that stays. `given`: the option; True stands for what suits the compressor."""
    if not method.lossy:
        return 0.0
    if given is None:
        return method.error_feedback
    return (method.error_feedback or 1.0) if given is True else float(given)


def _text(method: Registration, values: Mapping[str, Any], nested: Mapping[str, Compressor]) -> str | None:
    """Return the string for options, those that differ from their defaults; None if a string cannot say them."""
    told: list[str] = []
    inner = [*map(written, nested.values())]
    for option, (_, default) in method.options.items():
        value = values.get(option, default)
        if value == default or (option == "warmup" and not values.get("start_iter")):
            continue
        if option == "error_feedback" and value in (0, 1):
            value = "1" if value and default else bool(value)  # true would be a default such as 0.9
        text = written(compressor(value)) if option == "warmup" else str(value)
        if text is None or set(",+") & set(text):
            return None
        told.append(f"{option}={text.lower() if value in (None, True, False) else text}")
    outer = f"{method.name}:{','.join(told)}" if told else method.name
    return None if None in inner else "+".join([outer, *filter(None, inner)])


def written(built: Any) -> str | None:
    """Return the text that builds a compressor; None if it was not built from one."""
    return getattr(built, WRITTEN, None)


def _with_text(built: Compressor, text: str | None) -> Compressor:
    """Keep on a compressor the text that builds it."""
    if text is not None and hasattr(built, "__dict__"):  # a class with slots has no room for it
        object.__setattr__(built, WRITTEN, text)
    return built


def _find(name: Any, mapping: Mapping[str, Any]) -> Registration:
    if not isinstance(name, str):
        raise ValueError(f"a compressor given as a mapping needs the key 'name', got {dict(mapping)!r}")
    if find(name) is None:
        for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
            _load(entry)
    if name not in registered:
        raise UnknownCompressor(name, sorted(compressors()))
    return registered[name]


def _load(entry: EntryPoint) -> None:
    """Import a plug-in; a class that did not register itself is registered under its entry point's name."""
    loaded = entry.load()
    if entry.name not in registered and isinstance(loaded, type):
        register(entry.name)(loaded)


def _load_quietly(entry: EntryPoint) -> None:
    if entry.name in registered:
        return
    try:
        _load(entry)
    except Exception as error:  # a broken plug-in of others must not hide the rest
        logger.warning("the compressor plug-in %s (%s) cannot be loaded: %r", entry.name, entry.value, error)


def parsed(text: str) -> Mapping[str, Any]:
    """`outer+inner:key=value` as nested mappings. Raises ValueError for what cannot be read."""
    if (count := len(OUTER_END.findall(text)) + 1) > DEEPEST:
        raise ValueError(
            f"a compressor has at most {DEEPEST} parts with a '+' between them, got {count}: {text[:60]}..."
        )
    plus = OUTER_END.search(text)
    outer, inner = (text[: plus.start()], text[plus.end() :]) if plus else (text, "")
    name, colon, options = map(str.strip, outer.partition(":"))
    if not name or (colon and not options) or (plus and not inner.strip()):
        raise ValueError(
            f"cannot read the compressor {text!r}: write name, name:key=value,key=value or outer+inner:..."
        )
    if NO_SIGN.fullmatch(name) and (meant := _with_signs(text)) is not None:
        raise ValueError(_lacks(text, meant))
    mapping: dict[str, Any] = {"name": name, **({"inner": parsed(inner)} if plus else {})}
    for option in options.split(",") if options else ():
        key, equals, value = option.partition("=")
        if not equals or not value:
            method = find(name)
            has = f"; {name} has the options {', '.join(method.options) or 'none'}" if method else ""
            raise ValueError(f"cannot read the option {option!r} of {text!r}: write key=value{has}")
        if key.strip() in mapping:
            raise ValueError(f"the option {key.strip()!r} stands twice in {text!r}")
        mapping[key.strip()] = value.strip()
    return mapping


def _with_signs(text: str) -> str | None:
    """Return the text with a '+' before each compressor, a ':' before its first option and a ',' before others.

    None where its first word is no compressor, or a compressor wraps nothing and no '+' is behind it.
    """
    meant, sign, method = "", ":", None
    for given, word in WORD.findall(re.sub(r"\s*=\s*", "=", text)):
        found = find(word)
        if not meant:
            meant, method = word, found
        elif found or "+" in given:
            if method and not method.wraps and "+" not in given:
                return None
            meant, sign, method = f"{meant}+{word}", ":", found
        else:
            meant, sign = f"{meant}{sign}{word}", ","
        if method is None and "+" not in given:
            return None
    return meant


def _lacks(text: str, meant: str) -> str:
    """The message for a text that lacks signs. `meant`: the text with them, which may be wrong, too."""
    message = (
        f"cannot read the compressor {text!r}: write a colon before the options and a '+' between compressors, as in "
        f"{meant!r}"
    )
    try:
        compressor(meant)
    except ValueError as error:
        return f"{message}. Then {error}"
    return message


def filled(spec: str | Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A specification with defaults, {method: {option: value}}, where it leaves them open; also in what it nests.

    >>> filled("bf16+powersgd:rank=2", {"powersgd": {"rank": 4, "seed": 1}})
    {'name': 'bf16', 'inner': {'rank': '2', 'seed': 1, 'name': 'powersgd'}}
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
