import pytest
import torch

from gradwire.experiments.ranks.device import device_here, device_of, unused_gpus


@pytest.mark.parametrize(
    ("count", "backend", "told"),
    [(0, "gloo", None), (8, "nccl", None), (1, "gloo", "1 GPU here and not"), (8, "gloo", "8 GPUs here and not")],
)
def test_gpus_are_missed_where_ranks_train_on_the_cpu(count, backend, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    found = unused_gpus(backend)
    assert (found or "").startswith(told or "")
    assert (found is None) == (told is None)
    assert device_of(backend) == ("cuda" if backend == "nccl" else "cpu")


def test_ranks_go_round_the_gpus(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert [device_here("gloo-cuda", rank).index for rank in range(4)] == [0, 1, 0, 1]
