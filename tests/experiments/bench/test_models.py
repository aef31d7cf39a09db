"""The models that the benchmark offers, on the meta device: built, sampled and differentiated at their full size."""

import pytest
import torch

from gradwire.experiments.bench.models import OTHERS, PICTURES, task, task_names

from ..given import VISION_PARAMETERS

BATCH = 2
PARAMETERS = VISION_PARAMETERS | {"bert": 109_514_298, "tiny": 600 * 272}  # bert with the head of a language model


def library_of(name):
    return "torchvision" if name in PICTURES else "transformers" if name == "bert" else "torch"


@pytest.mark.parametrize("name", task_names())
def test_every_model_gives_each_of_its_parameters_a_gradient(name):
    pytest.importorskip(library_of(name))
    chosen = task(name, image_size=224)
    with torch.device("meta"):
        model = chosen.build()
    assert name not in PARAMETERS or sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    inputs, targets = (each.to("meta") for each in chosen.sample(BATCH, torch.Generator().manual_seed(0)))
    assert len(inputs) == len(targets) == BATCH
    loss = chosen.loss(model, inputs, targets)
    assert loss.shape == ()
    loss.backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == []


def test_the_models_of_pytorch_s_benchmark_are_among_them():
    assert {"resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"} <= set(task_names())
    assert set(task_names()) == {*PICTURES, *OTHERS}
