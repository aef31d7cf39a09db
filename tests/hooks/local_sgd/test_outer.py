import pytest
import torch

from gradwire.hooks.local_sgd.outer import Outer, outer, suited


@pytest.mark.parametrize(
    "specification", ["nesterov", "nesterov:lr=0.3,momentum=0.5", "sgd", "sgd:lr=0.5,momentum=0.9"]
)
def test_its_steps_are_those_of_torchs_sgd(specification):
    built, generator = outer(specification), torch.Generator().manual_seed(0)
    anchor, momentum = torch.randn(50, generator=generator), torch.zeros(50)
    theirs = torch.nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([theirs], lr=built.lr, momentum=built.momentum, nesterov=built.nesterov)
    for _ in range(5):
        difference = torch.randn(50, generator=generator)
        theirs.grad = difference.clone()
        optimizer.step()
        built.step(anchor, difference, momentum)
        torch.testing.assert_close(anchor, theirs.detach(), rtol=1e-6, atol=1e-6)


def test_it_is_read_from_a_specification():
    assert outer("nesterov") == Outer(0.7, 0.9, nesterov=True)
    assert outer("sgd:momentum=0.5") == Outer(1.0, 0.5, nesterov=False)


@pytest.mark.parametrize(
    ("preset", "built"),
    [
        ("average", Outer(1.0, 0.0, nesterov=False)),
        ("diloco", Outer(0.7, 0.9, nesterov=True)),
        ("muloco", Outer(0.7, 0.6, nesterov=True)),
        ("slowmo", Outer(1.0, 0.5, nesterov=False)),
    ],
)
def test_a_preset_has_the_values_of_its_paper(preset, built):
    assert outer(preset) == built


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="came with torch 2.9")
def test_it_suits_the_optimizer_of_matrices():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    adamw = torch.optim.AdamW([vector])
    assert suited([torch.optim.Muon([matrix]), adamw]) == "muloco"
    assert suited([adamw]) == suited([torch.optim.SGD([matrix, vector])]) == suited([object()]) == "average"


def test_an_average_moves_the_anchor_to_the_mean_of_the_models():
    anchor = torch.tensor([4.0, 8.0])
    outer("average").step(anchor, torch.tensor([1.0, -2.0]), torch.zeros(2))
    assert anchor.tolist() == [3.0, 10.0]


@pytest.mark.parametrize(
    ("specification", "said"),
    [
        ("adam", "nesterov or sgd"),
        ("sgd:rate=1", "average, diloco, muloco, slowmo, or nesterov or sgd, with lr and momentum"),
        ("sgd:lr=x", "is a number"),
        ("sgd:lr=0", "above 0"),
        (3, "nesterov or sgd"),
    ],
)
def test_what_is_wrong_is_said(specification, said):
    with pytest.raises(ValueError, match=said):
        outer(specification)
