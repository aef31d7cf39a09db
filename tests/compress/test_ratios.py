"""The PowerSGD paper's compression ratios, from shapes alone."""

import pytest
import torch
from torch import nn

import gradwire


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, bias=False),
            nn.BatchNorm2d(outside),
            nn.Conv2d(outside, outside, 3, bias=False),
            nn.BatchNorm2d(outside),
        )
        if inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside))


def resnet18():
    sizes = [(64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
    blocks = [Block(inside, outside, 1) for inside, outside in sizes]
    return nn.Sequential(nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), *blocks, nn.Linear(512, 10))


def lstm():
    decoder = nn.Module()
    decoder.bias = nn.Parameter(torch.empty(28869))
    return nn.ModuleList([nn.Embedding(28869, 650), nn.LSTM(650, 650, 3), decoder])


@pytest.mark.parametrize(
    ("network", "parameters", "ratios"),
    [(resnet18, 11_173_962, {1: 243.26, 2: 135.84, 4: 72.13}), (lstm, 28_949_319, {1: 309.66, 2: 203.14, 4: 120.35})],
)
def test_the_paper_s_ratios_to_two_decimals(network, parameters, ratios):
    with torch.device("meta"):
        model = network()
    for rank, expected in ratios.items():
        plan = gradwire.plan(model, f"powersgd:rank={rank}", world_size=16)
        assert plan.parameters == parameters
        assert round(plan.compression_ratio, 2) == expected
