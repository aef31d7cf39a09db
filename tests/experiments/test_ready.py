import json
import shlex
import sys

import torch

from gradwire.experiments.cli import main


def test_every_gradient_is_timed_once_in_the_order_of_backward(tmp_path, capsys, monkeypatch):
    file, before = tmp_path / "ready.json", torch.get_rng_state()
    flags = ["--model=mlp", "--model.width=16", "--batch-size=2", "--steps=2", f"--json={file}"]
    monkeypatch.setattr(sys, "argv", ["/bin/gradwire", "ready", *flags])
    assert main(sys.argv[1:]) == 0
    assert torch.equal(torch.get_rng_state(), before)
    document = json.loads(file.read_text())
    rows = document["rows"]
    assert document["kind"] == "ready"
    assert document["command"] == f"gradwire ready {shlex.join(flags)}"
    assert rows[0]["parameter"].startswith("5.")  # the last layer's come first
    assert len({row["parameter"] for row in rows}) == len(rows) == 6
    assert rows[-1]["ready_elements"] == sum(row["elements"] for row in rows)
    medians = [row["seconds"]["p50"] for row in rows]
    assert medians == sorted(medians)
    assert all(row["seconds"]["min"] <= row["seconds"]["p50"] <= row["seconds"]["max"] for row in rows)
    assert "mlp: gradients in the order they get ready" in capsys.readouterr().out
