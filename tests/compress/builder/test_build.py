"""From specifications to compressors, and what is said of those that cannot be built."""

import re
from dataclasses import dataclass, field

import pytest
import torch

from gradwire.compress import (
    ACPPowerSGD,
    BatchedPowerSGD,
    BFloat16,
    Dense,
    ErrorFeedback,
    Float16,
    Float32Arithmetic,
    Gathered,
    Int4,
    OneBit,
    PowerSGD,
    Switch,
    TopK,
    TwoShot,
    WorkerMomentum,
    compressor,
    specification,
)
from gradwire.compress.baselines.chunktopk import ChunkTopK
from gradwire.compress.baselines.randomk import RandomK
from gradwire.compress.builder.build import fingerprint, with_error_feedback
from gradwire.compress.builder.optimizer_defaults import tuned


def fed_back(inner, kept=1.0):
    return ErrorFeedback(Float32Arithmetic(inner), kept=kept)


def damped(inner):
    """As those are by default that do not keep all of a residual."""
    return fed_back(inner, 0.7)


BUILT = {
    "none": Dense(),
    "fp16": Float16(Dense()),
    "bf16": BFloat16(Dense()),
    "powersgd": fed_back(PowerSGD()),
    "batched-powersgd:rank=2": fed_back(BatchedPowerSGD(rank=2)),
    "topk": fed_back(Gathered(TopK())),
    "topk:ratio=1e-3,value_dtype=fp16": fed_back(Gathered(TopK(ratio=0.001, value_dtype="fp16"))),
    "topk:k=3": fed_back(Gathered(TopK(k=3))),
    "onebit:block=64": damped(TwoShot(OneBit(block=64))),
    "onebit:error_feedback=1": fed_back(TwoShot(OneBit())),
    "onebit:error_feedback=true": damped(TwoShot(OneBit())),
    "onebit:error_feedback=false": Float32Arithmetic(TwoShot(OneBit(), error_feedback=False)),
    "int4:block=64,rounding=stochastic": fed_back(TwoShot(Int4(block=64, rounding="stochastic"))),
    "acp-powersgd:rank=2,seed=1": fed_back(ACPPowerSGD(rank=2, seed=1)),
    "randomk:ratio=0.1,block=64,seed=3": damped(RandomK(ratio=0.1, block=64, seed=3)),
    "chunktopk:ratio=0.1,chunk=64": damped(ChunkTopK(ratio=0.1, chunk=64)),
    "powersgd:warm_start=false,seed=7": fed_back(PowerSGD(warm_start=False, seed=7)),
    "powersgd:error_feedback=false": Float32Arithmetic(PowerSGD()),
    "powersgd:error_feedback=1": fed_back(PowerSGD()),
    "powersgd:error_feedback=0": Float32Arithmetic(PowerSGD()),
    "topk:error_feedback=0.9": fed_back(Gathered(TopK()), 0.9),
    "topk:momentum=0.9": WorkerMomentum(fed_back(Gathered(TopK())), 0.9),
    "topk:momentum=0.5,error_feedback=false": WorkerMomentum(Float32Arithmetic(Gathered(TopK())), 0.5),
    "powersgd:error_feedback=0.7,momentum=0.9,start_iter=5": WorkerMomentum(
        fed_back(Switch({0: Dense(), 5: PowerSGD()}), 0.7), 0.9
    ),
    "fp16+powersgd:error_feedback=0.9": Float16(fed_back(PowerSGD(), 0.9)),
    " powersgd:rank=1, seed = 2 ": fed_back(PowerSGD(rank=1, seed=2)),
    "powersgd : rank=1,seed=2": fed_back(PowerSGD(rank=1, seed=2)),
    "powersgd:start_iter=0": fed_back(PowerSGD()),
    "powersgd:start_iter=10": fed_back(Switch({0: Dense(), 10: PowerSGD()})),
    "powersgd:start_iter=10,warmup=bf16": fed_back(Switch({0: BFloat16(Dense()), 10: PowerSGD()})),
    "fp16:start_iter=5": Switch({0: Dense(), 5: Float16(Dense())}),
    "fp16+none": Float16(Dense()),
    "fp16+powersgd:rank=1": Float16(fed_back(PowerSGD(rank=1))),
    "bf16 + powersgd:start_iter=3": BFloat16(fed_back(Switch({0: Dense(), 3: PowerSGD()}))),
    "fp16:start_iter=5+powersgd": Switch({0: Dense(), 5: Float16(fed_back(PowerSGD()))}),
}
MAPPINGS = [
    ({"name": "powersgd", "rank": 2, "warm_start": False}, "powersgd:rank=2,warm_start=false"),
    ({"name": "powersgd", "rank": "2"}, "powersgd:rank=2"),
    ({"name": "topk", "k": None, "ratio": 1}, "topk:ratio=1"),
    ({"name": "fp16", "inner": {"name": "powersgd", "rank": 1}}, "fp16+powersgd:rank=1"),
    ({"name": "fp16", "inner": "powersgd:rank=1"}, "fp16+powersgd:rank=1"),
    ({"name": "fp16", "inner": fed_back(PowerSGD(rank=1))}, "fp16+powersgd:rank=1"),
    ({"name": "powersgd", "start_iter": 9, "warmup": {"name": "bf16"}}, "powersgd:start_iter=9,warmup=bf16"),
    ({"name": "topk", "start_iter": 9, "warmup": "onebit"}, "topk:start_iter=9,warmup=onebit:error_feedback=false"),
    ({"name": "bf16", "sum": "float32"}, "bf16:sum=float32"),
    ({"name": "powersgd", "start_iter": 9, "warmup": BFloat16()}, "powersgd:start_iter=9,warmup=bf16"),
    ({"name": "int4", "start_iter": 9, "warmup": "int8"}, "int4:start_iter=9,warmup=int8"),
]
ALL = "acp-powersgd, adaptive, batched-powersgd, bf16, dgc, fp16, hosts, int2, int4, int8, none, onebit, powersgd, topk"
TOPK_OPTIONS = "ratio, k, value_dtype, scope, error_feedback, momentum, residual_bits, start_iter, warmup"
REFUSED = {  # specification: what the message must say
    "": ["cannot read", "''", "name:key=value"],
    "topk:": ["cannot read", "'topk:'", "name:key=value"],
    "fp16+": ["cannot read", "'fp16+'", "outer+inner"],
    "+topk": ["cannot read", "'+topk'", "outer+inner"],
    "topk:ratio": ["cannot read the option 'ratio'", "key=value"],
    "topk:ratio=": ["cannot read the option 'ratio='", "key=value"],
    "topkk": ["unknown compressor 'topkk'", "did you mean 'topk'?", ALL],
    "hosts-int8": ["unknown compressor 'hosts-int8'", "did you mean 'hosts+int8'?", ALL],
    "zzzz": ["unknown compressor 'zzzz'; there are", ALL],
    "powersgd:start_iter=2,warmup=topp": ["unknown compressor 'topp'", "'topk'", ALL],
    "topk:rank=4": ["'topk' has no option 'rank'", TOPK_OPTIONS],
    "none:start_iter=2": ["'none' has no option 'start_iter'", "it has: none"],
    "fp16:error_feedback=false": ["'fp16' has no option 'error_feedback'", "start_iter, warmup"],
    "topk:ratio=0.1,ratio=0.2": ["'ratio' stands twice", "'topk:ratio=0.1,ratio=0.2'"],
    "fp16:inner=powersgd+powersgd:rank=1": ["'inner' stands twice"],
    "topk:k=1.5": ["topk:k takes int", "'1.5'"],
    "topk:value_dtype=fp8": ["topk:value_dtype takes fp32, fp16", "'fp8'"],
    "powersgd:error_feedback=maybe": ["powersgd:error_feedback takes true, false or a float", "'maybe'"],
    "topk:ratio=0": ["topk:ratio", "above 0", "at most 1", "got 0.0"],
    "topk:error_feedback=1.1": ["topk:error_feedback", "from 0", "to 1", "got 1.1"],
    "topk:feedback=0.9": ["'topk' has no option 'feedback'", "did you mean 'error_feedback=0.9'?"],
    "topk,error_feedback=0.9": ["a colon before the options", "'topk:error_feedback=0.9'"],
    "int4,feedback=0.9": ["a colon before the options", "'int4' has no option 'feedback'", "'error_feedback=0.9'?"],
    "powersgd(4)": ["a colon before the options", "'powersgd:4'", "write key=value; powersgd has the options rank, "],
    "powersgd:4": ["cannot read the option '4'", "write key=value; powersgd has the options rank, "],
    "bf16+int4;block=64": ["a colon before the options", "'int4:block=64'"],
    "hosts,ranks=2+int8": ["a colon before the options", "as in 'hosts:ranks=2+int8'"],
    "int8 error_feedback=false + int4": ["as in 'int8:error_feedback=false+int4'. Then 'int8' wraps nothing"],
    "hosts int8:block=8": ["a '+' between compressors, as in 'hosts+int8:block=8'"],
    "fp16, powersgd:rank=2": ["a '+' between compressors, as in 'fp16+powersgd:rank=2'"],
    "hosts (int4)": ["a '+' between compressors, as in 'hosts+int4'"],
    "fp16 powersgd rank=4": ["a '+' between compressors, as in 'fp16+powersgd:rank=4'"],
    "fp16  powersgd(rank = 4; seed=1)": ["as in 'fp16+powersgd:rank=4,seed=1'"],
    "powersgd rank=4 start_iter=1e+3": ["as in 'powersgd:rank=4,start_iter=1e+3'"],
    "powersgd rank=4 ranks=2": ["as in 'powersgd:rank=4,ranks=2'. Then 'powersgd' has no option 'ranks'"],
    "bf16 int4 block=64 + none": ["as in 'bf16+int4:block=64+none'. Then 'int4' wraps nothing"],
    "int4 :": ["cannot read", "'int4 :'", "name:key=value"],
    "int8;int4": ["unknown compressor 'int8;int4'"],
    "int8/int4": ["two compressors are FSDP2's", "gather='int8', reduce='int4'", "--parallel fsdp"],
    "topk:momentum=1": ["topk:momentum", "at least 0", "below 1", "got 1.0"],
    "topk:k=0": ["topk:k", "at least 1", "got 0"],
    "powersgd:rank=0": ["powersgd:rank", "at least 1", "got 0"],
    "powersgd:power_iterations=0": ["powersgd:power_iterations", "at least 1", "got 0"],
    "powersgd:min_compression_rate=-1": ["powersgd:min_compression_rate", "at least 0", "got -1.0"],
    "powersgd:start_iter=-1": ["powersgd:start_iter", "at least 0", "got -1"],
    "powersgd:warmup=bf16": ["powersgd:warmup", "start_iter"],
    "onebit:block=0": ["onebit:block", "multiple of 8", "got 0"],
    "int4:block=12": ["int4:block", "multiple of 8", "got 12"],
    "int4:rounding=up": ["int4:rounding takes nearest, stochastic", "'up'"],
    "int8:block=24,rotate=true": ["int8:block", "power of two", "got 24"],
    "onebit:block=24": ["onebit:block", "power of two", "got 24"],
    "bf16+int8": ["packs its own bytes"],
    "randomk:block=0": ["randomk:block", "at least 1", "got 0"],
    "chunktopk:ratio=1.1": ["chunktopk:ratio", "above 0", "at most 1", "got 1.1"],
    "chunktopk:chunk=-2": ["chunktopk:chunk", "at least 1", "got -2"],
    "topk+powersgd": ["'topk' wraps nothing", "bf16, fp16"],
    "fp16+topk": ["packs its own bytes", "value_dtype=fp16"],
    "fp16+topk:scope=tensor": ["TopK packs its own bytes"],
    "fp16+powersgd:start_iter=5,warmup=topk": ["packs its own bytes"],
    "bf16+powersgd:payload=int8": ["packs its own bytes"],
    "bf16+powersgd:payload=int4": ["packs its own bytes"],
    "fp16:sum=float32+int8": ["leave sum out"],
    "bf16+adaptive": ["packs its own bytes"],
    "bf16:sum=float32+powersgd": ["bf16:sum=float32 is of whole gradients"],
    "bf16:sum=float64": ["bf16:sum takes 16bit, float32"],
    "topk:scope=layer": ["topk:scope takes bucket, tensor, got 'layer'"],
    "powersgd:payload=int3": ["payload takes float, int8, int4, got 'int3'"],
    "int4:core=-1": ["core is a rank, or 0 for no low-rank part; got -1"],
    "hosts:ranks=0+topk": ["hosts:ranks is at least 1, got 0"],
    "dgc:ratio=0": ["dgc:ratio"],
    "dgc:momentum=1": ["dgc:momentum"],
    "dgc:warmup_steps=-1": ["dgc:warmup_steps"],
    "dgc:clip=0": ["dgc:clip"],
    "dropping:cap=0": ["dropping:cap"],
    "dropping:sample=2": ["dropping:sample"],
    "adacomp:bin=0": ["adacomp:bin"],
    "adaptive:target=1.5": ["adaptive:target is a cosine, from 0 ", " got 1.5"],
    "adaptive:ladder=none": ["adaptive:ladder has 2 to 16 compressors, the most exact first, ", " got 'none'"],
    "adaptive:ladder=none//int8": ["adaptive:ladder has 2 to 16 compressors"],
    "adaptive:ladder=none/int7": ["unknown compressor 'int7'"],
    "adaptive:ladder=none/adaptive": ["cannot take 'adaptive'"],
    "adaptive:ladder=none/topk:momentum=0.9": ["give start_iter, error_feedback and momentum to adaptive itself"],
    "adaptive:ladder=none/int8:start_iter=3": ["adaptive:ladder cannot take 'int8:start_iter=3'"],
    "adaptive:ladder=none/dgc": ["adaptive:ladder cannot take 'dgc'"],
    "adaptive:ladder=none/hosts": ["write hosts+ in front of it"],
}


@pytest.mark.parametrize("spec", BUILT)
def test_a_string_builds_what_it_says(spec):
    assert compressor(spec) == BUILT[spec]


@pytest.mark.parametrize(("mapping", "spec"), MAPPINGS, ids=str)
def test_a_mapping_says_the_same_as_a_string_and_is_left_as_it_is(mapping, spec):
    before = dict(mapping)
    assert compressor(mapping) == compressor(spec)
    assert mapping == before


@pytest.mark.parametrize(
    "built", [Dense(), fed_back(Gathered(TopK(k=3))), Switch({0: Dense(), 3: PowerSGD()})], ids=str
)
def test_an_object_is_returned_as_it_is(built):
    assert compressor(built) is built


@pytest.mark.parametrize("spec", REFUSED)
def test_a_refusal_says_what_is_wrong_and_what_is_allowed(spec):
    with pytest.raises(ValueError, match=r".*".join(map(re.escape, REFUSED[spec]))):
        compressor(spec)


WIDTHS = {
    "onebit": ["1bit", "1-bit", "1 bit", "int1", "1"],
    "int2": ["2bit", "2-bit", "INT2", "uint2", "q2", "bits2"],
    "int4": ["4bit", "4-bit", "4 bits", "int-4", "Int4", "fp4", "nf4", "nvfp4", "mxfp4", "float4", "q4", "4"],
    "int8": ["8bit", "8-bit", "int 8", "INT8", "uint8", "fp8", "float8", "mxfp8", "q8", "8"],
    "bf16": ["16bit", "16-bit", "bfloat16", "bfloat-16", "BF16", "16"],
    "none": ["32bit", "fp32", "float32", "f32", "32"],
}


@pytest.mark.parametrize(("spelling", "meant"), [(each, meant) for meant in WIDTHS for each in WIDTHS[meant]])
def test_a_number_of_bits_names_the_compressor_of_that_width(spelling, meant):
    with pytest.raises(ValueError, match=f"unknown compressor '{spelling}' .did you mean '{meant}'.*there are: .*topk"):
        compressor(spelling)


@pytest.mark.parametrize("spelling", ["int16", "uint16", "int32", "int3", "6bit", "int44"])
def test_a_number_of_bits_without_a_compressor_lists_those_that_there_are(spelling):
    listed = "(by bits there are bf16, fp16, int8, int4, int2 and onebit)"
    with pytest.raises(ValueError, match=rf"unknown compressor '{spelling}' {re.escape(listed)}; there are: .*topk"):
        compressor(spelling)


def nested(depth):
    spec = {"name": "none"}
    for _ in range(depth):
        spec = {"name": "fp16", "inner": spec}
    return spec


ADAM = torch.optim.Adam([torch.zeros(1, requires_grad=True)])


@pytest.mark.parametrize("read", [compressor, with_error_feedback, lambda spec: tuned(spec, ADAM)])
def test_compressors_inside_each_other_without_end_are_refused_and_counted(read):
    with pytest.raises(ValueError, match=r"at most 16 parts with a '\+' between them, got 3001: fp16"):
        read("fp16+" * 3000 + "none")
    with pytest.raises(ValueError, match="nested at most 16 deep by inner and warmup, got more"):
        read(nested(3000))


@pytest.mark.parametrize("mapping", [{}, {"rank": 4}, {"name": 3}, {"name": None}], ids=str)
def test_a_mapping_without_a_name_is_refused(mapping):
    with pytest.raises(ValueError, match=r"needs the key 'name', got \{"):
        compressor(mapping)


@pytest.mark.parametrize("value", [True, [1], "", {}], ids=str)
def test_a_mapping_s_values_are_checked_as_a_string_s_are(value):
    with pytest.raises(ValueError, match=r"powersgd:rank takes int, got "):
        compressor({"name": "powersgd", "rank": value})


@pytest.mark.parametrize("thing", [3, None, ["topk"], TopK, Dense, TopK()], ids=str)
def test_what_is_no_specification_is_refused_by_type(thing):
    with pytest.raises(TypeError, match="a string, a mapping or an object with init and reduce, got"):
        compressor(thing)


def test_equal_specifications_build_equal_compressors_that_can_be_keys():
    assert len({compressor(spec) for spec in BUILT if "powersgd:rank=1" in spec}) == 2
    assert all(hash(compressor(spec)) == hash(compressor(spec)) for spec in BUILT)


def test_a_plus_inside_a_number_does_not_nest():
    assert compressor("powersgd:start_iter=1e+3") == compressor("powersgd:start_iter=1000")
    assert compressor("fp16+powersgd:start_iter=1E+3") == compressor("fp16+powersgd:start_iter=1000")


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "topk",
        "topk:ratio=0.05",
        "topk:k=3,value_dtype=fp16,error_feedback=false",
        "onebit:block=8",
        "topk:ratio=0.1,error_feedback=0.9",
        "onebit:error_feedback=0.5,momentum=0.9",
        "int4:error_feedback=false,momentum=0.9",
        "onebit:block=8,error_feedback=1",
        "chunktopk:error_feedback=0.9",
        "natural:error_feedback=true",
        "natural:error_feedback=0.9",
        "randomk:error_feedback=false",
        "bf16+powersgd:rank=2,error_feedback=0.7,momentum=0.9,start_iter=9",
        "randomk:ratio=0.1,seed=2",
        "chunktopk:chunk=64",
        "acp-powersgd:rank=2,min_compression_rate=1.0",
        "powersgd:rank=2,min_compression_rate=0.5,warm_start=false,start_iter=9,warmup=bf16",
        "batched-powersgd:rank=1,start_iter=2",
        "bf16",
        "bf16:start_iter=5",
        "fp16+powersgd:rank=1",
        "bf16:start_iter=3+powersgd:rank=2,error_feedback=false",
    ],
)
def test_a_compressor_is_written_as_it_is_asked_for(text):
    assert specification(compressor(text)) == text


def test_what_is_said_by_default_is_left_out_and_what_no_string_builds_has_its_repr():
    assert specification(compressor("topk:ratio=0.01,error_feedback=true")) == "topk"
    assert specification(compressor("randomk:error_feedback=0.7")) == "randomk"
    assert specification(PowerSGD(rank=2)) == repr(PowerSGD(rank=2))
    assert specification(OfFields(frozenset())) == "OfFields(names={}, inner=None)"


@dataclass(frozen=True)
class OfFields:
    """A compressor of somebody else's."""

    names: frozenset[str]
    inner: object = None
    place: str = field(default="cuda:0", init=False)

    def init(self, layout):
        return None

    def reduce(self, grad, state, residual=None):
        yield from ()
        return grad


def test_a_fingerprint_has_all_options_in_one_order_and_nothing_of_the_process():
    built = OfFields(frozenset({"b", "a", "c"}), ErrorFeedback(OfFields(frozenset())))
    inner = "ErrorFeedback(inner=OfFields(names={}, inner=None), residual_bits=32, kept=1.0)"
    assert fingerprint(built) == f"OfFields(names={{'a', 'b', 'c'}}, inner={inner})"
