"""What a state that was saved by an older version means: its compressor's specification, by the defaults of then."""

import re

import pytest

from gradwire.compress import compressor, compressors, specification
from gradwire.compress.build import fingerprint as fingerprint_of
from gradwire.compress.registry import OF_ALL, OF_FEEDBACK, registered
from gradwire.ddp_core.memory.checkpoint import FORMAT, checked
from gradwire.ddp_core.memory.earlier import with_options_of_then

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
DEFAULTS = {  # of FORMAT 2; options that come later are added, and stand for what was done without them
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
UNBIASED = {"natural", "qsgd", "terngrad"}  # without error feedback unless asked
FEEDBACK = {"error_feedback": True, "feedback": 1.0, "momentum": 0.0, "space": "gradient", "guard": False}


def test_the_table_belongs_to_this_format_and_knows_every_method():
    ours = {name for name, method in registered.items() if method.factory.__module__.startswith("gradwire.")}
    assert FORMAT == 2, RAISE
    assert ours == set(DEFAULTS)
    assert {option: default for option, (_, default) in OF_FEEDBACK.items()} == FEEDBACK, RAISE
    assert {option: default for option, (_, default) in OF_ALL.items()} == {"start_iter": 0, "warmup": "none"}, RAISE


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_of_a_method_are_those_that_saved_states_have(name):
    options, shared = compressors()[name]["options"], registered[name].shared
    assert {option: default for option, default in options.items() if option not in shared} == DEFAULTS[name], RAISE
    if registered[name].lossy:
        assert options["error_feedback"] is (name not in UNBIASED), RAISE
        assert options["feedback"] == float(name not in UNBIASED), RAISE


THEN = {  # {a specification in a state of format 1: what it meant}
    "onebit": "onebit:rotate=false",
    "onebit:block=64": "onebit:block=64,rotate=false",
    "hosts:ranks=2+onebit:feedback=0.9": "hosts:ranks=2+onebit:rotate=false,feedback=0.9",
    "topk:start_iter=3,warmup=onebit:error_feedback=false": {
        "name": "topk",
        "start_iter": 3,
        "warmup": "onebit:rotate=false,error_feedback=false",
    },
    "adaptive:budget=2%": "adaptive:ladder=none/int8/int4/ternary,target=0.95,budget=2%",
    "int4": "int4",
}


def of_format(number, spec):
    """A state without parameters."""
    header = {"gradwire": number, "compressor": "as it was built then", "world_size": 2, "rank": 0, "spec": spec}
    return {**header, "step": 3, "buckets": [], "parameters": {}, "tensors": 0}


@pytest.mark.parametrize("spec", THEN)
def test_a_state_of_format_1_is_of_what_its_specification_meant_then(spec):
    assert checked(of_format(1, spec), compressor(THEN[spec]), 2, 0)["step"] == 3
    if spec != THEN[spec]:
        meant, here = (specification(compressor(each)) for each in (THEN[spec], spec))
        with pytest.raises(ValueError, match=re.escape(f"saved with compressor = {meant}, here it is {here}: attach")):
            checked(of_format(1, spec), compressor(spec), 2, 0)


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
    assert with_options_of_then(today) == today


@pytest.mark.parametrize("number", [0, 3, 1.0, "1", None])
def test_a_state_of_a_format_that_is_not_known_is_refused(number):
    with pytest.raises(ValueError, match="load it with the version of gradwire that wrote it"):
        checked(of_format(number, "onebit"), compressor("onebit"), 2, 0)
