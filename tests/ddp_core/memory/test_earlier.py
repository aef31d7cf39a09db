"""What a state that was saved by an older version means: its compressor's specification, by the defaults of then."""

import re

import pytest

from gradwire.compress import compressor, compressors, specification
from gradwire.compress.builder.build import fingerprint as fingerprint_of
from gradwire.compress.protocol.registry import registered
from gradwire.ddp_core.memory.checkpoint import checked
from gradwire.ddp_core.memory.earlier import repr_of_today

from .test_checkpoint import of_format

THEN = {  # {(the format of a state, its specification): what it meant}
    (1, "onebit"): "onebit:rotate=false,feedback=1",
    (1, "onebit:block=64"): "onebit:block=64,rotate=false,feedback=1",
    (1, "hosts:ranks=2+onebit:feedback=0.9"): "hosts:ranks=2+onebit:rotate=false,feedback=0.9",
    (1, "topk:start_iter=3,warmup=onebit:error_feedback=false"): {
        "name": "topk",
        "start_iter": 3,
        "warmup": "onebit:rotate=false,error_feedback=false",
    },
    (1, "adaptive"): "adaptive:ladder=none/int8/int4/ternary,target=0.95",
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


@pytest.mark.parametrize(("number", "spec"), THEN)
def test_a_state_of_an_earlier_format_is_of_what_its_specification_meant_then(number, spec):
    then = THEN[number, spec]
    assert checked(of_format(number, spec), compressor(then), 2, 0)["step"] == 3
    if compressor(spec) != compressor(then):
        meant, here = (specification(compressor(each)) for each in (then, spec))
        with pytest.raises(ValueError, match=re.escape(f"saved with compressor = {meant}, here it is {here}: attach")):
            checked(of_format(number, spec), compressor(spec), 2, 0)


FINGERPRINTS = {  # {the specification of a state of format 1 whose compressor no string builds: what it meant}
    "ErrorFeedback(inner=Float32Arithmetic(inner=Switch(starts=(0, 3), stages=(DecayedFeedback("
    "inner=ErrorFeedback(inner=Float32Arithmetic(inner=TwoShot(codec=OneBit(block=64)))), feedback=0.5), "
    "Gathered(codec=TopK(ratio=0.01, k=None, value_dtype='fp32', scope='bucket')))"
    ")))": {"name": "topk", "start_iter": 3, "warmup": "onebit:block=64,rotate=false,feedback=0.5"},
    "ErrorFeedback(inner=Float32Arithmetic(inner=Switch(starts=(0, 3), stages=(Float32Arithmetic("
    "inner=Adaptive(ladder='none/int8/int4/ternary', target=0.9)), Gathered(codec=TopK("
    "ratio=0.01, k=None, value_dtype='fp32', scope='bucket'))))))": {
        "name": "topk",
        "start_iter": 3,
        "warmup": "adaptive:ladder=none/int8/int4/ternary,target=0.9",
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
