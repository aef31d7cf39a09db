import pytest
import torch
from torch import nn

from gradwire.experiments.workloads.emulation import (
    from_flops,
    load_trace,
    trace_names,
)
from gradwire.experiments.workloads.models import ModelConfig, build_model

from ...given import VISION_PARAMETERS
from .given import shapes

PARAMETERS = VISION_PARAMETERS | {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt-20m": 19_176_704,
    "resnet18-cifar": 11_173_962,
}


def definitions():
    """Models whose shapes and operations are not ours to define, or defined elsewhere: {trace: (model, batch)}."""
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True, norm_first=True)
        blocks = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
        transformer = nn.Sequential(nn.Embedding(256, 512), blocks, nn.Linear(512, 256))
        return {
            "gpt-20m": (transformer, torch.zeros(4, 32, dtype=torch.int64)),
            "resnet18-cifar": (build_model(ModelConfig("resnet18-cifar")), torch.zeros(128, 3, 32, 32)),
        }


def assert_defined_as(name, model, batch):
    trace = load_trace(name)
    counted = from_flops(model, batch, name=name, source="", samples_per_second=trace.batch_size / trace.seconds)
    assert trace.parameters == shapes(model)
    assert trace.batch_size == counted.batch_size
    for way in ("forward_seconds", "backward_seconds"):
        expected = {layer.name: getattr(layer, way) for layer in counted.layers}
        assert {layer.name: getattr(layer, way) for layer in trace.layers if layer.parameters} == pytest.approx(
            {layer.name: expected[layer.name] for layer in trace.layers if layer.parameters}
        )


@pytest.mark.parametrize("name", definitions())
def test_a_shipped_trace_has_the_shapes_and_operations_of_torchs_modules(name):
    assert_defined_as(name, *definitions()[name])


@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d", "vgg19"])
def test_a_shipped_trace_has_the_shapes_and_operations_of_torchvisions_model(name):
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        assert_defined_as(name, models.get_model(name), torch.zeros(32, 3, 224, 224))


@pytest.mark.parametrize("name", trace_names())
def test_shipped_traces_are_of_the_known_sizes_and_say_where_their_time_is_from(name):
    trace = load_trace(name)
    assert trace.elements == PARAMETERS[name]
    assert trace.backward_seconds == pytest.approx(2 * trace.forward_seconds)
    assert ("published" in trace.source) == name.startswith(("resnet50", "resnet101", "resnext"))
    assert ("assumption" in trace.source) != ("published" in trace.source)
