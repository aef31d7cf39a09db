import pytest
import torch
from torch import nn

from gradwire.experiments.workloads.emulation import from_flops, load_trace
from gradwire.experiments.workloads.emulation.shipped import SHIPPED
from gradwire.experiments.workloads.models import ModelConfig, build_model

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


def test_inceptions_trace_has_the_shapes_and_operations_of_torchvisions_without_its_auxiliary_classifier():
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        model = models.inception_v3(aux_logits=False, init_weights=False)
        assert_defined_as("inceptionv3", model, torch.zeros(32, 3, 299, 299))


def test_sockeyes_trace_has_the_shapes_of_torchs_modules_and_its_first_layer_takes_no_time():
    """Vocabularies of IWSLT 2015, Vietnamese; the widths that Sockeye's first version had by default."""
    with torch.device("meta"):
        encoder = {"embedding": nn.Embedding(17191, 512), "lstm": nn.LSTM(512, 512, bidirectional=True)}
        attention = {"query": nn.Linear(1024, 256), "key": nn.Linear(1024, 256), "score": nn.Linear(256, 1, bias=False)}
        decoder = {
            "embedding": nn.Embedding(7709, 512),
            "lstm": nn.LSTM(512 + 1024, 1024),
            "attention": nn.ModuleDict(attention),
            "hidden": nn.Linear(2048, 1024),
            "output": nn.Linear(1024, 7709),
        }
        model = nn.ModuleDict({"encoder": nn.ModuleDict(encoder), "decoder": nn.ModuleDict(decoder)})
    trace = load_trace("sockeye")
    assert shapes(model) == trace.parameters
    assert trace.layers[0].forward_seconds == 0 < trace.layers[1].forward_seconds
    assert trace.seconds == pytest.approx(0.4)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_traces_are_of_the_known_sizes_and_say_where_their_time_is_from(name):
    trace = load_trace(name)
    assert trace.elements == PARAMETERS[name]
    assert trace.backward_seconds == pytest.approx(2 * trace.forward_seconds)
    assert ("published" in trace.source) == name.startswith(("resnet50", "resnet101", "resnext"))
    assert ("assumption" in trace.source) != ("published" in trace.source)
