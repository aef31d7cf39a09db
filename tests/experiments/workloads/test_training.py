import json

import pytest
import torch
from torch import nn

from gradwire.experiments.cli import main
from gradwire.experiments.compare import command
from gradwire.experiments.workloads.training import loss_of

SHARED = ("--model=mlp", "--model.width=16", "--data=digits", "--compressors=none", "--nproc=1", "--eval-batches=100")


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Runs `compare` without its pictures and its report."""
    monkeypatch.setattr(command, "write_output", lambda results, out: None)

    def train(name, *flags):
        out = tmp_path / name
        assert main(["compare", *SHARED, f"--out={out}", *flags]) == 0
        return json.loads((out / "results.json").read_text())["runs"][0]

    return train


@pytest.mark.parametrize("ddp", ["torch", "gradwire"])
def test_two_batches_a_step_are_one_of_twice_the_size(trained, ddp):
    halves = trained("halves", f"--ddp={ddp}", "--batch-size=8", "--steps=4", "--sync-every=2")
    whole = trained("whole", f"--ddp={ddp}", "--batch-size=16", "--steps=2")
    assert halves["steps"] == 4
    pairs = zip(halves["loss"][::2], halves["loss"][1::2], strict=True)
    assert [(one + two) / 2 for one, two in pairs] == pytest.approx(whole["loss"])
    assert halves["eval"]["loss"] == pytest.approx(whole["eval"]["loss"], rel=1e-5)


def test_autocast_computes_in_bfloat16_and_keeps_losses_and_gradients_in_float32():
    seen = []
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    loss = loss_of(model, torch.ones(2, 4), torch.tensor([0, 1]), autocast=True)
    loss.backward()
    assert seen == [torch.bfloat16]
    assert loss.dtype == model.weight.grad.dtype == torch.float32
