"""What ranks tell each other outside of programs."""

import torch
import torch.distributed as dist

from gradwire.ddp_core.transport.collectives import exchange


class Group:
    def size(self):
        return 1


def test_texts_travel_by_way_of_the_rank_s_own_gpu_though_another_one_is_the_current(monkeypatch):
    current = []

    class Chosen:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *_):
            current.pop()

    def gather(texts, text, group):
        texts[0] = f"{text} by {current}"

    monkeypatch.setattr(torch.cuda, "device", Chosen)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert exchange("a", Group(), torch.device("cuda", 3)) == ["a by [device(type='cuda', index=3)]"]
    assert exchange("a", Group(), torch.device("cpu")) == exchange("a", Group()) == ["a by []"]
