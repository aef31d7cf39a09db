"""The models that the benchmark offers, on the meta device: built, sampled and differentiated at their full size."""

import pytest
import torch

from gradwire.experiments.bench.models import task, task_names
from gradwire.experiments.workloads.models import SIZED, TORCHVISION, VISION, ModelConfig, build_model, model_names

from ..given import VISION_PARAMETERS

BATCH = 2
OTHERS = {"bert": 109_514_298, "tiny": 600 * 272, "gpt-0.9m": 875_264, "gpt-162m": 162_349_056}  # bert with its head
DEEPER = ("resnet101", "resnext101_32x8d")  # than others of the same blocks


def library_of(name):
    return "torchvision" if name in VISION else "transformers" if name == "bert" else "torch"


@pytest.mark.parametrize("name", [name for name in task_names() if name not in DEEPER])
def test_every_model_gives_each_of_its_parameters_a_gradient(name):
    pytest.importorskip(library_of(name))
    chosen = task(name, image_size=224)
    with torch.device("meta"):
        model = chosen.build()
    expected = (VISION_PARAMETERS | OTHERS).get(name)
    assert expected in (None, sum(p.numel() for p in model.parameters()))
    inputs, targets = (each.to("meta") for each in chosen.sample(BATCH, torch.Generator().manual_seed(0)))
    assert len(inputs) == len(targets) == BATCH
    loss = chosen.loss(model, inputs, targets)
    assert loss.shape == ()
    loss.backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == []


def test_a_model_is_shown_with_its_size():
    assert task("gpt-0.9m", 64).size == "gpt-0.9m (875,264 parameters)"


def test_bench_and_plan_know_each_other_s_names():
    assert set(model_names()) - set(task_names()) == {"gpt", "lstm", f"{TORCHVISION}NAME"}
    assert task(f"{TORCHVISION}vgg19", 64).name == task("vgg19", 64).name
    with torch.device("meta"):
        for name in SIZED:  # bench, compare, plan and advise mean the same, and the name says how much
            built, benched = build_model(ModelConfig(name)), task(name, 64).build()
            sizes = {sum(each.numel() for each in model.parameters()) for model in (built, benched)}
            assert {f"gpt-{size / 1e6:.{1 if size < 1e7 else 0}f}m" for size in sizes} == {name}
    for name in VISION:
        assert ModelConfig(name) == ModelConfig(f"{TORCHVISION}{name}")
