import json

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS = 3


def reported(rank, world_size, folder, counted=True, hosts=1):
    """Train until `report_loss` ends the training; the losses, and the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADWIRE_TRY_FOLDER", folder if hosts == 1 else f"{folder}/{rank}")
        patch.setenv("GRADWIRE_TRY_STEPS", str(STEPS))
        patch.setattr("gradwire.hooks.report_loss.host_name", lambda: f"host {rank % hosts}")
        torch.manual_seed(0)
        model, losses = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False)), []
        handle = gradwire.attach(model, "int8")
        try:
            for step in range(2 * STEPS):
                loss = model(torch.full((2, 64), float(rank + step))).square().mean()
                loss.backward()
                losses.append(loss.item())
                gradwire.report_loss(loss, handle if counted else None)
        except SystemExit as ended:
            return losses, ended.code
        finally:
            handle.close()


def test_each_rank_writes_its_losses_and_ends_without_an_error_after_the_wanted_steps(ranks, tmp_path):
    results = ranks.run(reported, 2, str(tmp_path))
    files = sorted(tmp_path.glob("rank-*.jsonl"))
    for (losses, code), file in zip(results, files, strict=True):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert code == 0
        assert len(lines) == STEPS
        assert [line["loss"] for line in lines] == losses
        assert lines[0]["at"] < lines[-1]["at"]
        assert 0 < lines[-1]["sent_bytes"] < 64 * 64 * 4
        assert 3 < lines[-1]["ratio"] < 4


def test_without_a_handle_the_bytes_stay_unknown(ranks, tmp_path):
    ranks.run(reported, 2, str(tmp_path), counted=False)
    assert all(
        json.loads(line).keys() == {"loss", "at"} for line in (tmp_path / "rank-00001.jsonl").read_text().splitlines()
    )
    assert json.loads((tmp_path / "place.json").read_text()) == {"hosts": 1, "on_cpus": True}


def test_each_host_gets_the_losses_of_all_ranks(ranks, tmp_path):
    for host in "01":
        (tmp_path / host).mkdir()
        (tmp_path / host / "rank-00001.jsonl").write_text("of an attempt that broke off")
    ranks.run(reported, 2, str(tmp_path), hosts=2)
    one, other = ({file.name: file.read_text() for file in (tmp_path / host).iterdir()} for host in "01")
    assert one == other
    assert sorted(one) == ["place.json", "rank-00000.jsonl", "rank-00001.jsonl"]
    assert json.loads(one["place.json"]) == {"hosts": 2, "on_cpus": True}
    assert len(one["rank-00001.jsonl"].splitlines()) == STEPS


def unanswered(rank, world_size, folder):
    """A report whose other ranks do not answer; the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradwire.hooks.report_loss.exchange", lambda *_, **__: 1 / 0)
        return reported(rank, world_size, folder)[1]


def test_without_an_answer_of_the_others_a_host_keeps_the_lines_of_its_own(ranks, tmp_path):
    assert ranks.run(unanswered, 2, str(tmp_path)) == [0, 0]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-00000.jsonl", "rank-00001.jsonl"]


def test_without_the_command_nothing_happens(monkeypatch):
    monkeypatch.delenv("GRADWIRE_TRY_FOLDER", raising=False)
    assert gradwire.report_loss(torch.tensor(1.0), None) is None
