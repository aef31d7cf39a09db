import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.workloads.emulation import (
    emulated,
    load_trace,
)
from gradwire.experiments.workloads.models import ModelConfig, build_model

from .given import shapes


def test_the_command_makes_a_trace_of_a_model_that_can_be_emulated(tmp_path, capsys):
    path = tmp_path / "mlp.json"
    assert main(["trace", "--model", "mlp", "--model.width", "16", "--seconds", "0.1", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    trace = load_trace(str(path))
    model = build_model(ModelConfig("mlp", width=16))
    assert trace.parameters == shapes(emulated(trace)) == shapes(model)
    assert f"{trace.elements:,} parameters" in shown
    assert "given by the user" in shown
    assert trace.seconds == pytest.approx(0.1)


def test_the_command_shows_traces_and_shares_out_a_given_time(tmp_path, capsys):
    assert main(["trace", "resnet50@0.1", "--rows", "3"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 107 layers" in shown
    assert "scaled to 0.1 s per step by the user" in shown
    path = tmp_path / "resnet.json"
    assert main(["trace", "--model", "resnet18-cifar", "--seconds", "0.2", "--json", str(path)]) == 0
    trace, shipped = load_trace(str(path)), load_trace("resnet18-cifar@0.2")
    assert trace.parameters == shipped.parameters
    assert trace.forward_seconds == pytest.approx(shipped.forward_seconds)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["vgg"], "did you mean 'vgg19'?"),
        (["vgg19", "--seconds", "1"], "for a trace write vgg19@1"),
        (["--seconds", "0"], "seconds is above 0, got 0"),
        (["--model", "gpt"], "give the seconds of a model's step"),
        (["vgg19", "--batch-size", "0"], "batch_size is at least 1, got 0"),
        (["vgg19", "--json", "/nowhere/a.json"], "json: there is no folder /nowhere"),
        (["vgg19", "--json", "."], "json: . is a folder; name a file, such as figures.json"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(arguments, words, capsys):
    assert main(["trace", *arguments]) == 2
    assert words in capsys.readouterr().err
