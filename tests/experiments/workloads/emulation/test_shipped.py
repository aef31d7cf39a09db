import pytest
import torch

from gradwire.experiments.workloads.emulation import from_flops, load_trace
from gradwire.experiments.workloads.emulation.shipped import SHIPPED

from ...given import VISION_PARAMETERS
from .given import shapes

PARAMETERS = VISION_PARAMETERS | {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt-20m": 19_176_704,
    "resnet18-cifar": 11_173_962,
    "inceptionv3": 23_834_568,
    "sockeye": 37_970_205,
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


@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d", "vgg19"])
def test_a_shipped_trace_has_the_shapes_and_operations_of_torchvisions_model(name):
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        assert_defined_as(name, models.get_model(name), torch.zeros(32, 3, 224, 224))


@pytest.mark.parametrize(
    ("name", "first", "last", "gflops"),
    [
        ("inceptionv3", "Conv2d_1a_3x3.conv", "fc", 2 * 5.713),
        ("gpt-20m", "0", "2", (6 * (24 * 512**2 * 32 + 4 * 32**2 * 512) + 2 * 512 * 256 * 32) / 1e9),
        ("resnet18-cifar", "0.0", "12", 2 * 0.5557),
    ],
)
def test_a_trace_that_is_recorded_has_its_modules_in_order_and_their_known_operations(name, first, last, gflops):
    """Operations of a sample's forward, two per multiply-add."""
    if name == "inceptionv3":
        pytest.importorskip("torchvision")
    layers = list(SHIPPED[name].definition())
    assert [layers[0].name, layers[-1].name] == [first, last]
    assert sum(layer.operations for layer in layers) == pytest.approx(gflops * 1e9, rel=1e-3)
    assert all(layer.parameters for layer in load_trace(name).layers)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_traces_are_of_the_known_sizes_and_say_where_their_time_is_from(name):
    trace = load_trace(name)
    assert trace.elements == PARAMETERS[name]
    assert trace.backward_seconds == pytest.approx(2 * trace.forward_seconds)
    assert ("published" in trace.source) == name.startswith(("resnet50", "resnet101", "resnext"))
    assert ("assumption" in trace.source) != ("published" in trace.source)
