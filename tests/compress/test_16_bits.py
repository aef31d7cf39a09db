"""16-bit gradients: float32 arithmetic without a float32 copy of the bucket, averages rounded once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.compress import Float32Arithmetic, Simulation, compressor

from .given import RANKS, Scaled, gradients, layout

HALVES = [torch.bfloat16, torch.float16]
SPECS = [
    "onebit:error_feedback=1",
    "onebit:block=64,rotate=false,error_feedback=1",
    "topk:ratio=0.1",
    "topk:ratio=0.1,value_dtype=fp16",
    "int8:error_feedback=1",
    "int4:rotate=true,error_feedback=1",
    "int2:error_feedback=1",
    "ternary:error_feedback=1",
    "natural:error_feedback=1",
    "terngrad:error_feedback=1",
    "qsgd:error_feedback=1",
    "powersgd:rank=2",
    "powersgd:rank=12,min_compression_rate=0",
    "powersgd:rank=2,power_iterations=2",
    "powersgd:warm_start=false",
    "batched-powersgd:rank=2",
    "powersgd:rank=2,payload=int8",
    "powersgd:rank=2,payload=int4,power_iterations=2",
    "acp-powersgd:rank=2",
    "randomk:ratio=0.1,block=16,error_feedback=1",
    "chunktopk:ratio=0.1,chunk=16,error_feedback=1",
    "adacomp:bin=50,error_feedback=1",
    "dropping:ratio=0.1,cap=0.2,error_feedback=1",
    "dropping:ratio=0.1,cap=0.2,scope=tensor,error_feedback=1",
    "adaptive",
    "adaptive:target=1",
    "adaptive:ladder=none/topk:ratio=0.1/powersgd:rank=2",
]
TAILS = ["", "error_feedback=false"]
SHAPES = ((40, 24), (13,), (24, 16))


def pair(spec, dtype):
    """Simulations on gradients of 16 bits, and on the same numbers in float32."""
    narrow, wide = (layout(*SHAPES, dtype=each) for each in (dtype, torch.float32))
    return Simulation(compressor(spec), narrow), Simulation(compressor(spec), wide)


def with_tail(spec, tail):
    """A compressor with the option, in place of its error feedback."""
    if tail and "error_feedback=1" in spec:
        return spec.replace("error_feedback=1", tail)
    return spec + (("," if ":" in spec else ":") + tail if tail else "")


@pytest.mark.each_name
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("spec", SPECS)
def test_the_average_is_that_of_float32_rounded_once(compiled_backend, spec, tail, dtype):
    spec = with_tail(spec, tail)
    narrow, wide = pair(spec, dtype)
    given = gradients(layout(*SHAPES, dtype=dtype))
    found = narrow.step(given)[0]
    expected = wide.step([each.float() for each in given])[0]
    step = torch.finfo(dtype).eps * expected.abs().clamp(min=2.0**-14)
    assert found.dtype == dtype
    assert ((found.float() - expected).abs() <= 0.51 * step + 1e-6).all()


class Copies(TorchDispatchMode):
    """The sizes of what is copied from 16 bits to 32."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and args[0].dtype in HALVES and made.dtype == torch.float32:
            self.sizes.append(made.numel())
        return made


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    "spec",
    [
        "onebit:rotate=false",
        "topk:ratio=0.1",
        "int8",
        "int4",
        "powersgd",
        "powersgd:start_iter=2",
        "powersgd:payload=int8",
        "acp-powersgd",
        "randomk:ratio=0.1",
        "chunktopk:ratio=0.1",
        "dropping",
        "adaptive:ladder=none/int8/int4",
        "adaptive:ladder=topk/powersgd",
    ],
)
def test_the_gradient_is_not_copied_to_32_bits(spec, tail):
    spec = with_tail(spec, tail)
    within = layout((400, 24), (24, 160), dtype=torch.bfloat16)
    simulation = Simulation(compressor(spec), within)
    for step in range(3):  # in the last of them the ranks of `adaptive` look at all methods: that may copy
        simulation.step(gradients(within, step))
    with Copies() as copies:
        simulation.step(gradients(within))
    assert within.numel not in copies.sizes


def test_a_compressor_that_does_not_take_16_bits_is_given_32():
    within = layout((40, 24), dtype=torch.bfloat16)
    with Copies() as copies:
        Simulation(Float32Arithmetic(Scaled(0.5)), within).step(gradients(within))
    assert copies.sizes == [within.numel] * RANKS
