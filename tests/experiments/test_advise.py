"""The command: what it shows and writes."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from gradwire.experiments import advise as command
from gradwire.experiments.advice.candidates import family
from gradwire.experiments.advise import run_rank
from gradwire.experiments.cli import main
from gradwire.experiments.workloads.emulation import Layer, Trace
from gradwire.experiments.workloads.models import ModelConfig


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A small accelerator's, in a file."""
    path = tmp_path_factory.mktemp("trace") / "small.json"
    layers = (Layer("first", {"weight": (64, 256)}, 0.002, 0.004), Layer("last", {"weight": (256, 64)}, 0.002, 0.004))
    Trace("small", "made by hand", 4, layers).write(path)
    return path


def shown_rank(rank, rendezvous, config, backend):
    """A rank whose words go to a file beside its results."""
    with Path(config.json).with_suffix(f".{rank}").open("w") as file, contextlib.redirect_stdout(file):
        run_rank(rank, rendezvous, config, backend)


def test_it_shows_the_table_and_writes_all_of_it(trace, tmp_path, monkeypatch):
    file = tmp_path / "advice.json"
    flags = ["--nproc=2", "--link=8mbit", "--compressors=int4", "--hosts=64", "--trial-seconds=1", f"--json={file}"]
    monkeypatch.setattr(command, "run_rank", shown_rank)
    assert main(["advise", f"--compute=emulate:{trace}", *flags]) == 0
    shown = file.with_suffix(".0").read_text()
    document = json.loads(file.read_text())
    for told in ("small, 32,768 parameters, 2 ranks", "NOT REAL: emulated link 8 Mbit/s", "network: AllReduce", "int4"):
        assert told in shown
    assert document["here"]["recommended"]["compressor"] == "int4"
    assert document["here"]["recommended"]["sentence"] in shown
    assert [each["ranks"] for each in document["elsewhere"]] == [64]
    rows = {(row["compressor"], row["order"]): row for row in document["here"]["rows"]}
    wire = 4 * 32_768 * 8 / 8e6
    assert 0.9 * wire < rows["none", "backward"]["step"] < 3 * wire  # other processes may take a while too
    assert rows["int4", "backward"]["sent_bytes"] < rows["none", "backward"]["sent_bytes"] / 6
    assert rows["none", "backward"]["bound"] >= 0.9 * wire


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_torchs_for_matrices_of_blocks_with_adamw_for_the_rest():
    config = command.AdviseConfig(model=ModelConfig("gpt"), optimizer="muon")
    model = command._model(config)
    muon, adamw = command._optimizers(config, model)
    assert type(muon) is torch.optim.Muon
    assert family([muon, adamw]) == "Muon"
    parameters = [each for group in muon.param_groups + adamw.param_groups for each in group["params"]]
    assert {*parameters} == {*model.parameters()}


def test_a_model_of_a_file_is_advised_on_with_its_own_batch_and_loss(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef build():\n    batch = {'x': torch.ones(4, 256)}\n"
        "    return torch.nn.Linear(256, 256), batch, lambda model, batch: model(batch['x']).square().mean()"
    )
    flags = [f"--model={tmp_path / 'mine.py'}:build", "--nproc=2", "--compressors=int8", "--trial-seconds=0"]
    assert main(["advise", *flags, f"--json={tmp_path / 'a.json'}"]) == 0
    document = json.loads((tmp_path / "a.json").read_text())
    assert {row["compressor"] for row in document["here"]["rows"]} >= {"none", "int8"}
    sent = [row["sent_bytes"] for row in document["here"]["rows"] if row["compressor"] == "none"]
    assert sent[0] == 4 * (256 * 256 + 256)
