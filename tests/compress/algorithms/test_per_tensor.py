"""Methods on each tensor of a bucket by itself, against the same on buckets of one tensor."""

import pytest
import torch

from gradwire.compress import Simulation, compressor

from ..given import gradients, layout

SHAPES = ((24, 31), (5,), (1,), (200,))
SPECS = ["topk:ratio=0.05", "topk:k=3,value_dtype=fp16", "dropping:ratio=0.1,cap=0.2", "adacomp:bin=20,cap=0.3"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_scope_tensor_is_the_method_on_buckets_of_one_tensor(spec, dtype):
    whole = Simulation(compressor(f"{spec},scope=tensor"), layout(*SHAPES, dtype=dtype))
    singles = [
        Simulation(compressor(spec), layout(shape, dtype=dtype, names=[f"p{index}"]))
        for index, shape in enumerate(SHAPES)
    ]
    for step in range(3):
        given = gradients(whole.layouts[0], step)
        parts = [gradient.split(whole.layouts[0].sizes) for gradient in given]
        expected = [single.step([rank[index] for rank in parts])[0] for index, single in enumerate(singles)]
        for output in whole.step(given):
            assert torch.equal(output, torch.cat(expected))
