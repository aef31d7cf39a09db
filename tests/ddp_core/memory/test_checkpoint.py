"""What a state that was saved by an older version means: its compressor's specification, by the defaults of then."""

import re

import pytest

from gradwire.compress import compressor, compressors, specification
from gradwire.compress.build import fingerprint as fingerprint_of
from gradwire.compress.registry import OF_ALL, OF_FEEDBACK, registered
from gradwire.ddp_core.memory.checkpoint import FORMAT, checked
from gradwire.ddp_core.memory.earlier import repr_of_today

RAISE = (
    "a changed default changes what a saved state means: raise FORMAT of memory/checkpoint.py, then change it here, too"
)
LATTICE = {"block": 128, "rounding": "nearest", "rotate": False}
LOW_RANK = {
    "rank": 4,
    "min_compression_rate": 2.0,
    "power_iterations": 1,
    "warm_start": True,
    "seed": 0,
    "payload": "float",
}
DEFAULTS = {  # of FORMAT 3; options that come later are added, and stand for what was done without them
    "acp-powersgd": {"rank": 4, "min_compression_rate": 2.0, "seed": 0},
    "adacomp": {"cap": 0.02, "scope": "bucket", "bin": 500},
    "adaptive": {"ladder": "none/int8/int4/int2", "target": 0.85, "budget": None},
    "batched-powersgd": LOW_RANK,
    "bf16": {},
    "chunktopk": {"ratio": 0.01, "chunk": 512},
    "dgc": {"ratio": 0.001, "momentum": 0.9, "warmup_steps": 0, "clip": None},
    "dropping": {"cap": 0.02, "scope": "bucket", "ratio": 0.01, "sample": 0.01},
    "fp16": {},
    "fp8": {**LATTICE, "format": "e4m3"},
    "hosts": {"ranks": None},
    "int2": {**LATTICE, "rotate": True},
    "int4": LATTICE,
    "int8": LATTICE,
    "natural": {"block": 128},
    "none": {},
    "onebit": {"block": 1024, "rotate": True},
    "powersgd": LOW_RANK,
    "qsgd": {"block": 128, "levels": 127},
    "randomk": {"ratio": 0.01, "block": 256, "seed": 0},
    "ternary": LATTICE,
    "terngrad": {"block": 1024, "clip": 2.5},
    "topk": {"ratio": 0.01, "k": None, "value_dtype": "fp32", "scope": "bucket"},
}
KEPT = {  # of a residual; all by the other methods
    **dict.fromkeys(("natural", "qsgd", "terngrad"), 0.0),  # without error feedback unless asked
    **dict.fromkeys(("onebit", "randomk", "chunktopk"), 0.7),
}
FEEDBACK = {"error_feedback": True, "feedback": 1.0, "momentum": 0.0, "space": "gradient", "guard": False}


def test_the_table_belongs_to_this_format_and_knows_every_method():
    ours = {name for name, method in registered.items() if method.factory.__module__.startswith("gradwire.")}
    assert FORMAT == 3, RAISE
    assert ours == set(DEFAULTS)
    assert {option: default for option, (_, default) in OF_FEEDBACK.items()} == FEEDBACK, RAISE
    assert {option: default for option, (_, default) in OF_ALL.items()} == {"start_iter": 0, "warmup": "none"}, RAISE


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_of_a_method_are_those_that_saved_states_have(name):
    options, shared = compressors()[name]["options"], registered[name].shared
    assert {option: default for option, default in options.items() if option not in shared} == DEFAULTS[name], RAISE
    if registered[name].lossy:
        assert options["error_feedback"] is (KEPT.get(name, 1.0) > 0), RAISE
        assert options["feedback"] == KEPT.get(name, 1.0), RAISE


THEN = {  # {(the format of a state, its specification): what it meant}
    (1, "onebit"): "onebit:rotate=false,feedback=1",
    (1, "onebit:block=64"): "onebit:block=64,rotate=false,feedback=1",
    (1, "hosts:ranks=2+onebit:feedback=0.9"): "hosts:ranks=2+onebit:rotate=false,feedback=0.9",
    (1, "topk:start_iter=3,warmup=onebit:error_feedback=false"): {
        "name": "topk",
        "start_iter": 3,
        "warmup": "onebit:rotate=false,error_feedback=false",
    },
    (1, "adaptive:budget=2%"): "adaptive:ladder=none/int8/int4/ternary,target=0.95,budget=2%",
    (1, "adaptive:ladder=none/int8:block=64/onebit,target=0.9"): (
        "adaptive:ladder=none/int8:block=64/onebit:rotate=false,target=0.9"
    ),
    (1, "int4"): "int4",
    (2, "onebit"): "onebit:feedback=1",
    (2, "onebit:momentum=0.9,feedback=0.7"): "onebit:momentum=0.9",
    (2, "onebit:error_feedback=false"): "onebit:error_feedback=false",
    (2, "randomk:ratio=0.1"): "randomk:ratio=0.1,feedback=1",
    (2, "bf16+chunktopk"): "bf16+chunktopk:feedback=1",
    (2, "topk:start_iter=3,warmup=chunktopk:error_feedback=false"): "topk:start_iter=3,warmup=chunktopk",
    (2, "adaptive:ladder=none/onebit,target=0.9"): "adaptive:ladder=none/onebit,target=0.9",
    (2, "topk"): "topk",
}


def of_format(number, spec):
    """A state without parameters."""
    header = {"gradwire": number, "compressor": "as it was built then", "world_size": 2, "rank": 0, "spec": spec}
    return {**header, "step": 3, "buckets": [], "parameters": {}, "tensors": 0}


@pytest.mark.parametrize(("number", "spec"), THEN)
def test_a_state_of_an_earlier_format_is_of_what_its_specification_meant_then(number, spec):
    then = THEN[number, spec]
    assert checked(of_format(number, spec), compressor(then), 2, 0)["step"] == 3
    if compressor(spec) != compressor(then):
        meant, here = (specification(compressor(each)) for each in (then, spec))
        with pytest.raises(ValueError, match=re.escape(f"saved with compressor = {meant}, here it is {here}: attach")):
            checked(of_format(number, spec), compressor(spec), 2, 0)


FINGERPRINTS = {  # {the specification of a state of format 1 whose compressor no string builds: what it meant}
    "ErrorFeedback(inner=Widen(inner=Switch(starts=(0, 3), stages=(Damped(inner=ErrorFeedback(inner=Widen(inner=TwoShot("
    "codec=OneBit(block=64)))), feedback=0.5), Gathered(codec=TopK(ratio=0.01, k=None, value_dtype='fp32', scope='bucket')))"
    ")))": {"name": "topk", "start_iter": 3, "warmup": "onebit:block=64,rotate=false,feedback=0.5"},
    "ErrorFeedback(inner=Widen(inner=Switch(starts=(0, 3), stages=(Widen(inner=Adaptive(ladder='none/int8/int4/ternary', "
    "target=0.9, budget=0.02)), Gathered(codec=TopK(ratio=0.01, k=None, value_dtype='fp32', scope='bucket'))))))": {
        "name": "topk",
        "start_iter": 3,
        "warmup": "adaptive:ladder=none/int8/int4/ternary,target=0.9,budget=0.02",
    },
}


@pytest.mark.parametrize("fingerprint", FINGERPRINTS)
def test_a_state_of_format_1_may_be_of_a_compressor_that_no_string_builds(fingerprint):
    meant = compressor(FINGERPRINTS[fingerprint])
    assert checked(of_format(1, fingerprint), meant, 2, 0)["step"] == 3
    with pytest.raises(ValueError, match="attach that compressor"):
        checked(of_format(1, fingerprint), compressor("topk:start_iter=3"), 2, 0)


@pytest.mark.parametrize("name", compressors())
def test_a_fingerprint_of_today_has_all_options_already(name):
    wrapped = {"inner": "int8"} if registered[name].wraps and name not in ("bf16", "fp16") else {}
    today = fingerprint_of(compressor({"name": name, **wrapped}))
    assert repr_of_today(today, 1) == today


@pytest.mark.parametrize("number", [0, 4, 1.0, "1", None])
def test_a_state_of_a_format_that_is_not_known_is_refused(number):
    with pytest.raises(ValueError, match="load it with the version of gradwire that wrote it"):
        checked(of_format(number, "onebit"), compressor("onebit"), 2, 0)
