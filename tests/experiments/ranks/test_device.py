import pytest
import torch

from gradwire.experiments.ranks.device import chosen_backend, device_here, device_of, shared_gpus, unused_gpus


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


@pytest.mark.parametrize(("gpus", "ranks", "told"), [(1, 2, "2 ranks share 1 GPU,"), (2, 4, "4 ranks share 2 GPUs,")])
def test_ranks_that_share_gpus_are_told_so(gpus, ranks, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert shared_gpus("gloo-cuda", ranks).startswith(told)
    assert shared_gpus("gloo-cuda", gpus) is None
    assert shared_gpus("gloo", ranks) is None
    assert device_of("gloo-cuda") == "cuda"


def test_ranks_go_round_the_gpus(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert [device_here("gloo-cuda", rank).index for rank in range(4)] == [0, 1, 0, 1]


def test_without_a_gpu_there_is_none_to_share(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="use --backend gloo"):
        chosen_backend("gloo-cuda", 2)
