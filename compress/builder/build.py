"""Build a compressor from a text such as `"powersgd:rank=4,start_iter=1000"` or `"fp16+powersgd:rank=1"`.

The grammar: `name`, `name:key=value,key=value`, `outer+inner:...`. A mapping says the same and nests freely:
`{"name": "powersgd", "rank": 4, "warmup": {"name": "bf16"}}`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias

from ..algorithms.adapters import PerTensor, TwoShot
from ..algorithms.dense import Dense
from ..feedback.error_feedback import DecayedFeedback, ErrorFeedback, Float32Arithmetic
from ..feedback.switch import Switch
from ..feedback.worker_momentum import WorkerMomentum
from ..protocol.compressor import Compressor, inside
from ..protocol.registry import BASELINES, OF_ALL, Registration, find, register, registered
from ..state.leaf import WIDTHS
from .options import did_you_mean, option_value

logger = logging.getLogger(__name__)
ENTRY_POINT_GROUP = "gradwire.compressors"
OUTER_END = re.compile(r"(?<![0-9][eE])\+")  # a '+' that is not part of a number such as 1e+3
NESTED = ("inner", "warmup")  # options that are specifications
DEEPEST = 16  # compressors inside each other
# The wrappers of a lossy compressor, the outermost first.
WRAPPERS = (WorkerMomentum, DecayedFeedback, ErrorFeedback, Float32Arithmetic)
Spec: TypeAlias = str | Mapping[str, Any] | Compressor


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
    raise TypeError(f"a compressor is given as a string, a mapping or an object with init and reduce, got {spec!r}")


def with_error_feedback(spec: Spec) -> Spec:
    """A specification for what the error feedback of another surrounds: all methods hold back all that they lack."""
    if not isinstance(spec, str | Mapping):
        return spec
    compressor(spec)  # imports what it names
    whole = {name: {"feedback": 1.0} for name, method in registered.items() if method.lossy and method.feedback < 1}
    return filled(spec, whole)


def fingerprint(built: Compressor) -> str:
    """A compressor and its options in words, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(built))


def specification(built: Compressor) -> str:
    """Return the shortest string that builds a compressor, or its fingerprint if no string does.

    Args:
        built: the compressor.

    Returns:
        A text for `gradwire.compressor`.

    >>> specification(compressor({"name": "fp16", "inner": "powersgd:rank=4,start_iter=9"}))
    'fp16+powersgd:start_iter=9'
    """
    text = _written(built)
    try:
        return text if text and compressor(text) == built else fingerprint(built)
    except ValueError:
        return fingerprint(built)


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
        # not specification(), which a stage inside of error feedback does not match by itself
        what = "uncompressed" if self.stage == Dense() else _written(self.stage) or specification(self.stage)
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


def _written(built: Any) -> str | None:
    """The string of a compressor as `_build` makes them."""
    core, wrapping = _unwrapped(built)
    stages: dict[str, Any] = {}
    if isinstance(core, Switch) and len(core.stages) == 2:
        stages = {"start_iter": core.starts[1]}
        stages |= {} if core.stages[0] == Dense() else {"warmup": _written(core.stages[0])}
        core = core.stages[1]
    core = core.inner if isinstance(core, PerTensor) else core
    core = getattr(core, "codec", core)
    method = next((each for each in registered.values() if each.factory is type(core)), None)
    if method is None:
        return None
    fields = [field for field in dataclasses.fields(core) if field.init]
    options = {f.name: getattr(core, f.name) for f in fields if getattr(core, f.name) != f.default}
    inner = options.pop("inner", None)
    kept = wrapping.get("feedback", 0)
    options |= {"error_feedback": kept > 0} if method.lossy and (kept > 0) != (method.feedback > 0) else {}
    if kept == (method.feedback or 1):
        wrapping.pop("feedback", None)
    given = {**options, **wrapping, **stages}.items()
    listed = ",".join(f"{key}={str(value).lower() if value in (None, True, False) else value}" for key, value in given)
    text = f"{method.name}:{listed}" if listed else method.name
    return text if inner is None else f"{text}+{_written(inner)}"


def _unwrapped(built: Any) -> tuple[Any, dict[str, Any]]:
    """Return what `_wrapped` was given, and the options for it; `feedback` only if there is error feedback."""
    options: dict[str, Any] = {}
    while isinstance(built, WRAPPERS):
        match built:
            case DecayedFeedback(feedback=value):
                options["feedback"] = value
            case WorkerMomentum(momentum=value):
                options["momentum"] = value
            case ErrorFeedback(residual_bits=value):
                options.setdefault("feedback", 1)
                options |= {"residual_bits": value} if value != WIDTHS[0] else {}
        built = built.inner
    return built, options


def _build(mapping: Mapping[str, Any]) -> Compressor:
    options = dict(mapping)
    method = _find(options.pop("name", None), mapping)
    inner = options.pop("inner", None)
    if inner is not None and not method.wraps:
        wrappers = ", ".join(sorted(name for name, other in registered.items() if other.wraps))
        raise ValueError(f"{method.name!r} wraps nothing; left of a '+' may stand: {wrappers}")
    values = {key: option_value(method, key, value) for key, value in options.items()}
    shared = {key: values.pop(key) for key in method.shared if key in values}
    stages = {key: shared.pop(key) for key in OF_ALL if key in shared}
    feedback = _feedback(method, **shared) if method.lossy else 0.0
    built = method.factory(**values, **({} if inner is None else {"inner": compressor(inner)}))
    built = method.adapter(built) if method.adapter else built
    built = dataclasses.replace(built, feedback=False) if isinstance(built, TwoShot) and not feedback else built
    built = _narrowed(method, built, feedback, shared.get("residual_bits", WIDTHS[0]))
    built = _warmed_up(method, built, feedback > 0, **stages)
    return _wrapped(method, built, **{**shared, "feedback": feedback}) if method.lossy else built


def _feedback(
    method: Registration, feedback: float | None = None, error_feedback: bool | None = None, **_: Any
) -> float:
    """Return the part of a residual that both options together keep."""
    if feedback is None:
        feedback = 0.0 if error_feedback is False else method.feedback or float(error_feedback or 0)
    if not 0 <= feedback <= 1:
        raise ValueError(f"{method.name}:feedback is from 0 (none) to 1 (all of the residual), got {feedback}")
    if error_feedback is False and 0 < feedback < 1:
        raise ValueError(f"{method.name}:error_feedback=false leaves nothing to damp: leave out feedback={feedback}")
    return 0.0 if error_feedback is False else feedback


def _narrowed(method: Registration, built: Any, feedback: float, bits: int) -> Compressor:
    """Return the compressor with residuals on servers in so many bits, if it has any."""
    if bits not in WIDTHS:
        raise ValueError(
            f"{method.name}:residual_bits is {', '.join(map(str, WIDTHS[:-1]))} or {WIDTHS[-1]}, got {bits}"
        )
    if bits != WIDTHS[0] and not feedback:
        raise ValueError(
            f"{method.name}:residual_bits={bits} needs error feedback, which is off: "
            "add error_feedback=true, or leave it out"
        )
    return dataclasses.replace(built, residual_bits=bits) if isinstance(built, TwoShot) else built


def _wrapped(
    method: Registration,
    built: Compressor,
    feedback: float,
    momentum: float = 0.0,
    residual_bits: int = WIDTHS[0],
    **_: Any,
) -> Compressor:
    """A lossy method with what surrounds it."""
    if not 0 <= momentum < 1:
        raise ValueError(f"{method.name}:momentum is at least 0 (none) and below 1, got {momentum}")
    built = Float32Arithmetic(built)
    built = ErrorFeedback(built, residual_bits) if feedback else built
    built = DecayedFeedback(built, feedback) if 0 < feedback < 1 else built
    return WorkerMomentum(built, momentum) if momentum else built


def _warmed_up(
    method: Registration,
    built: Compressor,
    feedback: bool,
    start_iter: int | None = None,
    warmup: Spec | None = None,
) -> Compressor:
    """`built` from step `start_iter` on, `warmup` before; `feedback`: whether error feedback will surround both."""
    before = None if warmup is None else compressor(with_error_feedback(warmup) if feedback else warmup)
    if start_iter is None and warmup is not None:
        raise ValueError(f"{method.name}:warmup needs start_iter, the number of steps that it lasts")
    if start_iter is not None and start_iter < 0:
        raise ValueError(f"{method.name}:start_iter is at least 0, got {start_iter}")
    if feedback and isinstance(before, ErrorFeedback):
        before = before.inner  # one residual is enough for both
    before = _serving(before, built) if feedback else before
    return Switch({0: before or Dense(), start_iter: built}) if start_iter else built


def _serving(built: Any, following: Any) -> Any:
    """The compressor with a residual on servers, although it was asked for without error feedback."""
    if isinstance(built, Float32Arithmetic):
        return Float32Arithmetic(_serving(built.inner, following))
    bits = getattr(following, "residual_bits", WIDTHS[0])
    return dataclasses.replace(built, feedback=True, residual_bits=bits) if isinstance(built, TwoShot) else built


def _find(name: Any, mapping: Mapping[str, Any]) -> Registration:
    if not isinstance(name, str):
        raise ValueError(f"a compressor given as a mapping needs the key 'name', got {dict(mapping)!r}")
    if find(name) is None:
        for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
            _load(entry)
    if name not in registered:
        known = sorted(compressors())
        hint = did_you_mean(name.lower(), known)
        raise ValueError(f"unknown compressor {name!r}{hint}; there are: {', '.join(known)}")
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
