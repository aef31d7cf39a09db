"""docs/benchmarks/gpu_quality.py, at its tiny size and without a GPU."""

import importlib
import json

import pytest
import torch

from gradwire.compress import compressor

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


def test_local_sgd_of_one_rank_trains_as_that_rank_does(script, tmp_path):
    one = ["none", *SETTINGS, "--ranks", "1"]
    losses = []
    for more in ([], ["--local-every", "4"]):
        script.main([*one, *more, "--json", str(tmp_path / "one.json")])
        (row,) = json.loads((tmp_path / "one.json").read_text())["runs"]
        losses.append(row["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_local_sgd_sends_one_step_in_so_many(script, tmp_path):
    (row,) = rows_of(script, tmp_path, "none", "--local-every", "2", "--outer", "muloco")
    assert row["ratio"] == 2.0
    assert row["losses"]["6"] < row["losses"]["2"]


@pytest.mark.parametrize("more", [[], ["--local-every", "4", "--outer", "muloco"]], ids=["at every step", "local SGD"])
def test_a_run_that_was_broken_off_ends_as_if_it_was_not(script, tmp_path, monkeypatch, more):
    names = ["powersgd:rank=2,payload=int4", "onebit", *more]
    whole = rows_of(script, tmp_path, *names)
    folder, validation_loss, calls = ["--folder", str(tmp_path / "kept")], script.validation_loss, []

    def breaks(*arguments):
        calls.append(arguments)
        if len(calls) % 3 == 2:
            raise KeyboardInterrupt
        return validation_loss(*arguments)

    monkeypatch.setattr(script, "validation_loss", breaks)
    for _ in range(20):
        try:
            again = rows_of(script, tmp_path, *folder, *names)
            break
        except KeyboardInterrupt:
            continue
    assert len(calls) > 3 * len(whole)
    assert [row["losses"] for row in again] == [row["losses"] for row in whole]
    assert [row["sent_bytes_per_step"] for row in again] == [row["sent_bytes_per_step"] for row in whole]
    calls.clear()
    assert [row["loss"] for row in rows_of(script, tmp_path, *folder, *names)] == [row["loss"] for row in whole]
    assert not calls


def test_a_budget_gives_all_runs_the_same_number_of_steps(script, tmp_path):
    text = script.text_of([ROOT / "hooks"], 1_000_000, 64, torch.device("cpu"))
    run = script.Run("none", 0, "adamw", 0, "tiny", 1, 1, 6e-4, None, text.about)
    assert script.affordable_steps([run], text, 100, deadline=0.0) == 50
    steps = script.affordable_steps([run], text, 100, deadline=script.time.monotonic() + 1e4)
    assert steps > 50
    assert steps % 50 == 0


def test_defaults_are_compressors(script):
    assert [compressor(name) for name in script.DEFAULTS]
