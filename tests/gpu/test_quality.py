"""docs/benchmarks/gpu_quality.py, at its tiny size and without a GPU."""

import importlib
import json

import pytest
import torch

from .parts import BENCHMARKS, ROOT

STEPS, RANKS, BATCH = 6, 2, 2
SETTINGS = ["--size", "tiny", "--steps", STEPS, "--ranks", RANKS, "--batch", BATCH, "--every", 2, "--device", "cpu"]
SETTINGS = [*map(str, SETTINGS), "--text", str(ROOT / "compress"), str(ROOT / "hooks")]


@pytest.fixture
def script(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_quality")


def rows_of(script, tmp_path, *arguments):
    script.main([*arguments, *SETTINGS, "--json", str(tmp_path / "result.json")])
    return json.loads((tmp_path / "result.json").read_text())["runs"]


def directly(script):
    """The loss where one process has all ranks' sequences in one batch."""
    about = script.options(SETTINGS)
    text = script.text_of(about.text, int(1e6 * about.megabytes), 64, torch.device("cpu"))
    torch.manual_seed(0)
    model = script.Gpt("tiny")
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 6e-4, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.1 + 0.9 * (1 + torch.cos(torch.tensor(torch.pi * max(0, step - 1) / 5)).item()) / 2
    )
    starts = torch.randint(len(text.train) - 64, (STEPS, RANKS * BATCH), generator=torch.Generator().manual_seed(0))
    for step in starts:
        sequences = torch.stack([text.train[start : start + 65] for start in step]).long()
        logits = model(sequences[:, :-1])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.reshape(-1, 256), sequences[:, 1:].reshape(-1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return script.validation_loss(model, text.validation)


def test_without_compression_ranks_train_as_one_process_with_all_their_sequences(script, tmp_path):
    (row,) = rows_of(script, tmp_path, "none")
    assert row["loss"] == pytest.approx(directly(script), rel=1e-5)
    assert row["ratio"] == 1.0
    assert row["sent_bytes_per_step"] == 4 * row["parameters"]  # 2 (n - 1) / n of float32, n = 2
