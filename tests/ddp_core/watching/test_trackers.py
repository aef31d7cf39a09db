"""What is told to the real TensorBoard and the real wandb is in the files that they leave behind."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

from ...forked import Script

EVERY, STEPS = 2, 5  # the reports are of the second and of the fourth step
WANDB = """
import json, sys
import wandb
from tests.ddp_core.watching.test_trackers import trained

with wandb.init(project="gradwire", mode="offline", dir=sys.argv[1]) as run:
    told = trained(run, lambda: run.log({"loss": 1.0}))
    rows, summary = run.step, dict(run.summary)
print(json.dumps({"told": told, "rows": rows, "summary": summary}))
"""


def trained(to, each_step=lambda: None):
    """Steps of one rank that `to` is told of; what a callable beside it was told: [(numbers, step)]."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, told = DistributedDataParallel(nn.Linear(8, 8)), []
        handle = gradwire.attach(model, "topk:ratio=0.1")
        handle.watch(EVERY, to)
        handle.watch(EVERY, lambda numbers, step: told.append((numbers, step)))
        for _ in range(STEPS):
            model(torch.ones(2, 8)).square().sum().backward()
            each_step()
        handle.close()
    finally:
        dist.destroy_process_group()
    return told


def test_tensorboard_reads_each_number_at_its_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        told = trained(writer)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert [step for _, step in told] == [2, 4]
    assert found.keys() == {f"gradwire/{name}" for numbers, _ in told for name in numbers}
    for name in told[0][0]:
        assert found[f"gradwire/{name}"] == [(step, pytest.approx(numbers[name])) for numbers, step in told], name


def test_wandb_has_the_numbers_in_the_rows_of_the_training(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    done = Script(WANDB, tmp_path).end()
    assert done.code == 0, done.errors
    found = json.loads(done.out.splitlines()[-1])
    numbers, step = found["told"][-1]
    assert step == 4
    assert found["rows"] == STEPS
    assert {name: found["summary"][f"gradwire/{name}"] for name in numbers} == pytest.approx({**numbers, "steps": step})
