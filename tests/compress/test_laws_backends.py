"""The two laws, for every registered compressor on every kernel backend that can run here; small, for the slow ones."""

import pytest
import torch

from ..conftest import BACKENDS
from .test_laws import NAMES, OWN_LAW, ROUNDING, assert_conserves, assert_telescopes, layout

pytestmark = pytest.mark.every_variant
# Compressors with as much sent a step as lets few steps tell; the others as they are registered.
COARSE = {
    "onebit": "onebit:block=8,error_feedback=1",
    "topk": "topk:ratio=0.3",
    "acp-powersgd": "acp-powersgd:rank=4",
    "randomk": "randomk:ratio=0.3,block=8,error_feedback=1",
    "chunktopk": "chunktopk:ratio=0.3,chunk=8,error_feedback=1",
    **{name: f"{name}:block=8,error_feedback=true" for name in ROUNDING},
    "dropping": "dropping:ratio=0.3,cap=0.5",
    "adacomp": "adacomp:bin=8,cap=0.5",
    "powersgd": "powersgd:rank=2",
    "batched-powersgd": "batched-powersgd:rank=2",
}
SPECS = [COARSE.get(name, name) for name in NAMES if name not in OWN_LAW]
TELESCOPING = [spec for spec in SPECS if "adacomp" not in spec]  # which calls no kernel, and takes more steps to tell
CALLS = ("bf16", "int8", "int2", "onebit", "topk", "powersgd", "acp-powersgd", "randomk")  # each kernel of Triton's
CASES = [
    (backend, spec) for backend in BACKENDS for spec in SPECS if backend != "triton" or spec.partition(":")[0] in CALLS
]
SHAPES = ((16, 12), (7,), (3, 3, 2), (1,))
STEPS = 21


@pytest.mark.parametrize(("backend", "spec"), CASES, indirect=["backend"])
def test_conservation_on_every_backend(backend, spec):
    dtype = (torch.float32, torch.bfloat16)[SPECS.index(spec) % 2]
    assert_conserves(spec, layout(SHAPES, dtype, 3), steps=2)


@pytest.mark.usefixtures("compiled_backend")  # many steps show no more of Triton's kernels than two do
@pytest.mark.parametrize("spec", TELESCOPING)
def test_telescoping_on_every_backend(spec):
    assert_telescopes(spec, layout(SHAPES, torch.float32, 2), STEPS)
