import pytest
import torch

from gradwire.experiments.compare.config import CompareConfig
from gradwire.experiments.ready import ReadyConfig
from gradwire.experiments.workloads.data import DataConfig, load_dataset
from gradwire.experiments.workloads.models import MODELS, ModelConfig, build_model

SMALL = {"gpt": {"width": 32, "layers": 2, "heads": 4, "context": 16}, "lstm": {"vocabulary": 50, "width": 8}}


def counted(model):
    return sum(parameter.numel() for parameter in model.parameters())


def built(name, dataset=None, **sizes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_model(ModelConfig(name, **{**SMALL.get(name, {}), **sizes}), dataset)


@pytest.fixture(scope="module")
def digits():
    return load_dataset(DataConfig("digits"), ModelConfig("mlp"))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(256)) * 10)
    return load_dataset(DataConfig("text", str(file)), ModelConfig("gpt", context=16))


@pytest.mark.parametrize(("name", "parameters"), [("resnet18-cifar", 11_173_962), ("lstm", 28_949_319)])
def test_the_paper_s_models_have_the_paper_s_number_of_parameters(name, parameters):
    with torch.device("meta"):
        assert counted(build_model(ModelConfig(name))) == parameters


def test_gpt_has_as_many_parameters_as_its_sizes_say():
    width, layers, context, vocabulary = 32, 3, 16, 100
    block = 12 * width * width + 13 * width  # attention 4 w², perceptron 8 w²; their biases 9 w and two norms 4 w
    expected = layers * block + (2 * vocabulary + context) * width + 2 * width
    assert counted(built("gpt", width=width, layers=layers, context=context, vocabulary=vocabulary)) == expected


def test_a_model_of_a_file_is_built_and_refused_where_it_would_be_evaluated(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\ndef build(): return torch.nn.Linear(3, 2), torch.ones(1, 3), None")
    config = ModelConfig(f"{tmp_path / 'mine.py'}:build")
    assert counted(build_model(config)) == 8
    for command in (CompareConfig, ReadyConfig):
        with pytest.raises(ValueError, match=r"gradwire advise --model .*mine.py:build or gradwire bench"):
            command(model=config)
    with pytest.raises(ValueError, match=r"there is no file missing.py here; .* FILE.py:FUNCTION"):
        ModelConfig("missing.py:build")


@pytest.mark.parametrize("name", ["mlp", "resnet18-cifar", "torchvision:resnet18"])
@pytest.mark.parametrize("shape", [(3, 32, 32), None], ids=["cifar", "digits"])
def test_a_classifier_gives_logits_of_every_image(name, shape, digits):
    if name.startswith("torchvision:"):
        pytest.importorskip("torchvision")
    images = torch.zeros(2, *(shape or digits.input_shape))
    assert built(name, None if shape else digits)(images).shape == (2, 10)


@pytest.mark.parametrize("name", ["gpt", "lstm"])
def test_a_later_token_changes_no_earlier_logits(name):
    model = built(name).eval()
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert not torch.isclose(after[:, 9], before[:, 9]).all()


def test_layers_do_not_start_alike():
    model = built("gpt", layers=3)
    matrices = [[p for p in block.parameters() if p.dim() > 1] for block in model.blocks.layers]
    assert all(len(each) == 4 for each in matrices)
    for one, other in zip(matrices[0], matrices[1], strict=True):
        assert not torch.equal(one, other)


def test_sizes_beside_a_function_of_a_file_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def build(): ...")
    with pytest.raises(ValueError, match=r"mine.py:build has its own sizes: leave out --model.width"):
        ModelConfig(f"{tmp_path / 'mine.py'}:build", width=3)


def test_an_unknown_torchvision_model_is_refused_with_those_near_it():
    pytest.importorskip("torchvision")
    with pytest.raises(ValueError, match=r"torchvision has no classifier 'resnet19' \(did you mean 'resnet18'\?\)"):
        build_model(ModelConfig("torchvision:resnet19"))
    with pytest.raises(ValueError, match="torchvision has no classifier ''"):
        build_model(ModelConfig("torchvision:"))


def test_a_vocabulary_smaller_than_the_data_s_is_refused(text):
    with pytest.raises(ValueError, match=r"model\.vocabulary is at least 256 for 'text', got 100"):
        build_model(ModelConfig("gpt", vocabulary=100), text)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns_its_own_shape_of_data(name, text, digits):
    dataset = text if MODELS[name].kind == "tokens" else digits
    sizes = {"vocabulary": 256} if name == "lstm" else {}
    inputs, targets = next(dataset.train_batches(2, seed=0, rank=0, world_size=1))
    logits = built(name, dataset, **sizes)(inputs)
    assert logits.flatten(0, -2).shape == (targets.numel(), dataset.classes)
