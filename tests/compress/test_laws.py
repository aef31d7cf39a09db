"""The two laws, for every registered compressor, wrapper, dtype, number of ranks and odd size, in the simulator."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch

from gradwire.compress import (
    Compressor,
    ErrorFeedback,
    Float32Arithmetic,
    Partition,
    Simulation,
    Switch,
    compressor,
    compressors,
)
from gradwire.compress.protocol.registry import BASELINES, find
from gradwire.compress.state.tree import Leaves
from gradwire.testing import SHAPES, bucket, held_back, random_gradients

OWN_LAW = ("dgc",)  # momentum inside: see test_dgc
DAMPED = ("onebit", "randomk", "chunktopk")  # by default, and then forget: see test_feedback


def whole(name):
    """The specification of a method that holds back all that it does not send."""
    return f"{name}:error_feedback=1" if name in DAMPED else name


NAMES = [name for name in (*compressors(), *BASELINES) if not name.startswith("shouting")]
PLAIN = [whole(name) for name in NAMES if name not in OWN_LAW]
SPECS = [
    *PLAIN,
    "bf16:sum=float32",
    "fp16+powersgd:rank=1",
    "bf16+batched-powersgd:rank=2",
    "powersgd:rank=3,power_iterations=2,min_compression_rate=0",
    "powersgd:warm_start=false",
    "powersgd:start_iter=2",
    "powersgd:payload=int8,min_compression_rate=0",
    "batched-powersgd:rank=2,payload=int4",
    "topk:k=9,value_dtype=fp16",
    "topk:scope=tensor,ratio=0.1,start_iter=1",
    "topk:ratio=0.2,start_iter=2,warmup=bf16",
    "onebit:block=64,error_feedback=1",
    "onebit:block=64,rotate=false,error_feedback=1",
    "int8:rounding=stochastic,error_feedback=true",
    "int8:rotate=true,error_feedback=true",
    "int4:block=16,rotate=true,rounding=stochastic",
    "int2:rotate=false,block=24,rounding=stochastic",
    "randomk:ratio=0.1,block=16,error_feedback=1",
    "chunktopk:ratio=0.1,chunk=16,error_feedback=1",
    "bf16+chunktopk:chunk=16,error_feedback=1",
    "acp-powersgd:rank=3,min_compression_rate=0",
    "fp16+acp-powersgd:rank=1",
    "powersgd:error_feedback=false",
    "int8:error_feedback=true",
    "natural:error_feedback=true",
    "dropping:ratio=0.2,cap=0.1",
    "adacomp:bin=8,cap=0.3",
    "qsgd:levels=7,block=16,error_feedback=true",
    "terngrad:error_feedback=true",
    "ternary:start_iter=2",
    "int4:core=2",
    "int2:core=1,block=16",
    "int4:residual_bits=8",
    "int4:residual_bits=16",
    "topk:ratio=0.1,residual_bits=16,start_iter=2,warmup=int8",
    "int4:start_iter=2,warmup=int8",
    "powersgd:rank=2,payload=int4,start_iter=2,warmup=int8",
]
# For what contains them these are like others of the same state and rounds.
ALIKE = {
    "fp16",
    "int4",
    "int2",
    "ternary",
    "onebit:error_feedback=1",
    "topk",
    "randomk:error_feedback=1",
    "chunktopk:error_feedback=1",
    "dropping",
    "adacomp",
    "qsgd",
    "terngrad",
    "powersgd",
    "batched-powersgd",
    "acp-powersgd",
    "bf16:sum=float32",
    "bf16+batched-powersgd:rank=2",
    "bf16+chunktopk:chunk=16,error_feedback=1",
    "fp16+acp-powersgd:rank=1",
    "powersgd:warm_start=false",
    "topk:k=9,value_dtype=fp16",
    "onebit:block=64,rotate=false,error_feedback=1",
    "int8:rounding=stochastic,error_feedback=true",
    "int8:rotate=true,error_feedback=true",
    "natural:error_feedback=true",
    "qsgd:levels=7,block=16,error_feedback=true",
    "terngrad:error_feedback=true",
    "int4:residual_bits=16",
}
KINDS = [spec for spec in SPECS if spec not in ALIKE]
ROUNDING = ("int8", "natural", "qsgd", "terngrad")  # they hold nothing back, unless they are asked to


def forgets(spec):
    """Whether what is not sent is lost."""
    return "error_feedback=false" in spec or (spec.split(":")[0] in ROUNDING and "error_feedback=true" not in spec)


# That nothing waits forever, test_laws_backends.py shows of the others, and test_capped.py of small caps.
TELESCOPING = [
    spec for spec in SPECS if not forgets(spec) and (spec not in PLAIN or spec == "adacomp") and "bin=8" not in spec
]
STEPS = 60
SLOW = ("topk:k=9", "bf16+chunktopk", "onebit:block=64,rotate=false")
LONG = {spec: 4 * STEPS for spec in TELESCOPING if spec.startswith(SLOW)}  # until each element has come several times
LONG |= dict.fromkeys(("adacomp", "fp16+acp-powersgd:rank=1"), 150)
CONSTANT = ((32, 24), (101,), (13, 3, 3, 3), (7,), (1,), (5, 1))  # small, so that top-k comes by every element often
OBJECTS = {
    "switch back to dense": ErrorFeedback(
        Float32Arithmetic(Switch({0: compressor("topk").inner.inner, 2: compressor("none")}))
    ),
    "partition": ErrorFeedback(
        Float32Arithmetic(
            Partition((("p1*", compressor("none")), ("p0", compressor("topk").inner.inner)), compressor("powersgd"))
        )
    ),
    "nested error feedback": ErrorFeedback(compressor("topk:ratio=0.1")),
}
# Relative to gradients of unit size: rounding of sums.
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2e-6}
BITS = {
    "fp16": 11,
    "bf16": 8,
}  # of a significand, the leading one included: a rounding changes a number by 2**-BITS of it
MANY = 500  # elements, over which roundings cancel: what they change along the gradient is less than a quarter of one
# What rounding a rank's residual and a server's loses in a step, of the largest number in them: half a 127th, a 256th.
NARROW_RESIDUAL = {"residual_bits=8": 2 / 254, "residual_bits=16": 2 / 512}


def layout(shapes, dtype, world_size):
    return bucket(shapes, ranks=world_size, dtype=dtype)


def rounding(spec, dtype):
    """How far one rounding to 16 bits is from a number, relative to it; 0 where nothing that is lost has 16 bits."""
    if spec in ("none", "hosts", "fp16", "bf16", "bf16:sum=float32") and dtype == torch.bfloat16:
        return 2.0 ** -BITS["bf16"]
    for name, bits in BITS.items():
        if str(spec).startswith((f"{name}+", f"{name}:")) or spec == name or f"warmup={name}" in str(spec):
            return 2.0**-bits
    return 0.0


def tolerance(spec, dtype, world_size):
    """Of an element: every rank's number is rounded, and so is each of their sums."""
    if rounding(spec, dtype):
        return (world_size + 1) * rounding(spec, dtype)
    return max(TOLERANCE[dtype], narrow(spec))


def assert_nothing_vanishes(missing, given, spec, dtype):
    """The part of a gradient that is missing, in float64. Roundings have any direction, and vanishing has the gradient's."""
    part = (missing @ given / (given @ given)).abs()
    assert given.numel() < MANY or part <= max(rounding(spec, dtype) / 4, narrow(spec) / 4, TOLERANCE[dtype])


def narrow(spec):
    return max((loss for option, loss in NARROW_RESIDUAL.items() if option in str(spec)), default=0.0)


def build(spec):
    return OBJECTS.get(spec) or compressor(spec)


@pytest.mark.each_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("spec", [*SPECS, *OBJECTS])
def test_conservation_what_goes_in_comes_out_or_is_held_back(compiled_backend, spec, dtype):
    if dtype == torch.float64 and compiled_backend != "reference":
        pytest.skip("float64 runs on the reference")
    turn = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}[dtype]
    pairs = [each for each in product(range(len(SHAPES)), (1, 2, 3, 4)) if sum(each) % 3 == turn]  # each with one dtype
    if dtype != torch.float64:
        pairs = pairs[compiled_backend == "native" :: 2]  # and on one backend
    for place, world_size in pairs:
        assert_conserves(spec, layout([*SHAPES.values()][place], dtype, world_size), steps=3)


def assert_conserves(spec, within, steps, built=None, roundings=1):
    """The law, for a specification; for one inside of `built`, with as many roundings to 16 bits."""
    simulation = Simulation(built or build(spec), within)
    generator = torch.Generator().manual_seed(within.ranks.world_size)
    for _ in range(steps):
        gradients = random_gradients(within, generator)
        before = held_back(simulation, within)
        outputs = simulation.step(gradients)
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        if forgets(spec):
            continue
        given = sum(gradient.double() for gradient in gradients) / within.ranks.world_size + before
        kept = outputs[0].double() + held_back(simulation, within)
        bound = roundings * tolerance(spec, within.dtype, within.ranks.world_size)
        assert (given - kept).abs().max() <= bound * max(1.0, given.abs().max())
        assert_nothing_vanishes(given - kept, given, spec, within.dtype)


OF_RESIDUALS = [name for name in NAMES if "residual_bits" in find(name).shared]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", OF_RESIDUALS)
def test_every_compressor_with_a_residual_conserves_gradients_with_few_bits_of_it(name, bits):
    within, sizes = layout(SHAPES["one huge, many tiny"], torch.float32, 2), []
    for width in (bits, 32):
        ladder = f"ladder=none/int4:residual_bits={width}," * (name == "adaptive")  # each method has servers of its own
        spec = f"{name}:{ladder}error_feedback=1,residual_bits={width}"
        assert_conserves(spec, within, steps=2)
        leaves = Leaves(compressor(spec).init(within))
        sizes.append(sum(leaf.flat.nbytes for leaf in leaves.residuals))
    ends = 132 * len(within.shapes) * len(leaves.residuals) * (bits == 8)  # a block of each parameter that is not full
    assert 0 < sizes[0] <= 1.04 * bits / 32 * sizes[1] + ends


@pytest.mark.parametrize("spec", TELESCOPING)
def test_telescoping_the_mean_output_converges_as_one_over_t(spec):
    dtype = (torch.float32, torch.bfloat16)[TELESCOPING.index(spec) % 2]
    assert_telescopes(spec, layout(CONSTANT, dtype, 2), LONG.get(spec, STEPS))


def assert_telescopes(spec, within, steps):
    """As 1/T: T times the error is bounded. It may grow by a fifth at most while T grows by half, besides rounding.

    What came out and what is held back add up to all that was given.
    """
    simulation = Simulation(build(spec), within)
    generator = torch.Generator().manual_seed(0)
    gradients = random_gradients(within, generator)
    target = sum(gradient.double() for gradient in gradients) / within.ranks.world_size
    total, owed = torch.zeros_like(target), []
    for step in range(1, steps + 1):
        total += simulation.step([gradient.clone() for gradient in gradients])[0].double()
        owed.append(((total - step * target).norm() / target.norm()).item())
    cut = steps * 2 // 3
    assert max(owed[cut:]) <= 1.2 * max(owed[:cut]) + steps * tolerance(spec, within.dtype, within.ranks.world_size)
    assert owed[-1] <= steps / 4
    missing = target - (total + held_back(simulation, within)) / steps
    assert_nothing_vanishes(missing, target, spec, within.dtype)


@dataclass(frozen=True)
class Leaky:
    """Two per cent of each average vanish."""

    inner: Compressor

    def init(self, layout):
        return self.inner.init(layout)

    def reduce(self, grad, state, residual=None):
        average = yield from self.inner.reduce(grad, state, residual)
        return average.mul_(0.98)


LEAKING = ("none", "bf16", "fp16", "bf16:sum=float32", "fp16+powersgd:rank=1", "bf16+batched-powersgd:rank=2", "int4")


@pytest.mark.parametrize("spec", LEAKING)
def test_the_laws_fail_where_two_per_cent_of_the_gradient_vanish(spec, monkeypatch):
    monkeypatch.setitem(OBJECTS, spec, Leaky(compressor(spec)))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(AssertionError):
            assert_conserves(spec, layout(SHAPES["layers"], dtype, 4), steps=1)
        with pytest.raises(AssertionError):
            assert_telescopes(spec, layout(CONSTANT, dtype, 2), STEPS)


@pytest.mark.parametrize("spec", [*SPECS, *OWN_LAW, *OBJECTS])
def test_what_is_not_finite_in_one_element_of_one_rank_shows_in_the_output_of_all(spec):
    """Also beside numbers whose squares are not finite, or vanish."""
    within, generator = layout(SHAPES["layers"], torch.float32, 2), torch.Generator().manual_seed(3)
    for bad, size in ((torch.inf, 1e30), (-torch.inf, 1.0), (torch.nan, 1e-30)):
        simulation = Simulation(build(spec), within)
        for step in range(2):
            given = [size * torch.randn(within.numel, generator=generator) for _ in range(2)]
            place = torch.randint(within.numel, (), generator=generator)
            given[step % 2][place] = bad
            outputs = simulation.copy().step(given)
            assert not any(output.isfinite().all() for output in outputs), f"{bad} at {place} in step {step}"
            given[step % 2][place] = size
            simulation.step(given)


# Whose blocks and factors are of one parameter each. Bucket-wide top-k, DGC and batched PowerSGD choose among all elements.
OF_PARAMETERS = [
    "int8",
    "int8:rounding=stochastic",
    "int4",
    "int4:error_feedback=false",
    "int4:rotate=true",
    "int4:core=2",
    "int2:core=1,block=16",
    "int4:residual_bits=8",
    "int4:residual_bits=16",
    "int2",
    "int2:residual_bits=8",
    "ternary",
    "onebit",
    "onebit:rotate=false",
    "onebit:rotate=false,residual_bits=8",
    "powersgd:min_compression_rate=0",
    "powersgd:payload=int4,min_compression_rate=0",
    "powersgd:min_compression_rate=0,residual_bits=8",
    "acp-powersgd:min_compression_rate=0",
    "hosts:ranks=2+int4",
]
SMALLER = 2.0**-13


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("spec", OF_PARAMETERS)
def test_a_parameter_with_smaller_gradients_has_a_smaller_average_and_changes_no_other(
    compiled_backend, spec, world_size
):
    """To the bit: a block that held elements of two parameters would round the smaller ones to zeros."""
    within = layout(((16, 24), (7,), (5, 3, 3, 3), (1,), (128,)), torch.float32, world_size)

    def averages(smaller=None):
        simulation, generator, found = Simulation(build(spec), within), torch.Generator().manual_seed(1), []
        for _ in range(3):
            given = [torch.randn(within.numel, generator=generator) for _ in range(world_size)]
            for gradient in given if smaller else ():
                within.views(gradient)[smaller].mul_(SMALLER)
            found.append(simulation.step(given)[0].clone())
        return found

    expected = averages()
    for name in within.names:
        for average, plain in zip(averages(name), expected, strict=True):
            scaled = plain.clone()
            within.views(scaled)[name].mul_(SMALLER)
            assert torch.equal(average, scaled), name
