import pytest

from gradwire.experiments.workloads.emulation import load_trace
from gradwire.experiments.workloads.emulation.shipped import SHIPPED


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
