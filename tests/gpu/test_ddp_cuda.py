"""DistributedDataParallel on CUDA against torch's: the same parameters after the same steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .test_engine_cuda import nccl, needs_nccl

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WIDTH, STEPS = 32, 8
SETTINGS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "devices": {"device_ids": [0]},
    "unused": {"find_unused_parameters": True},
    "dropping": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}
SPECS = ["bf16", "powersgd:rank=2", "topk:ratio=0.1"]


class Net(nn.Module):
    """Four layers, the third of which only every second step uses, unless all are asked for."""

    def __init__(self, norm=False):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, inputs, step):
        for index, layer in enumerate(self.layers):
            if index != 2 or step % 2 == 0:
                inputs = layer(inputs).tanh()
        return self.norm(inputs)


def trained(model, rank, changing, rate=0.1):
    """Its parameters on the CPU."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * rank + step)
        inputs = torch.randn(8, WIDTH, generator=generator).cuda()
        model(inputs, step if changing else 0).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def both(rank, group, name):
    torch.cuda.set_device(0)
    options = {"process_group": group, "bucket_cap_mb": 0.005, **SETTINGS[name]}
    changing = name in ("unused", "dropping")
    skip = {"skip_all_reduce_unused_params": name == "dropping"}
    ours = gradwire.DistributedDataParallel(Net().cuda(), **options, **skip)
    return trained(ours, rank, changing), trained(TorchDDP(Net().cuda(), **options), rank, changing)


def with_gloo(rank, world_size, name):
    return both(rank, dist.group.WORLD, name)


def with_nccl(rank, world_size, name):
    return both(rank, nccl(rank), name)


BACKENDS = pytest.mark.parametrize(
    ("run", "world_size"), [(with_gloo, 2), pytest.param(with_nccl, 1, marks=needs_nccl)], ids=["gloo", "nccl"]
)


@BACKENDS
@pytest.mark.parametrize("name", SETTINGS)
def test_ours_trains_as_torch_s(ranks, run, world_size, name):
    for ours, torchs in ranks.run(run, world_size, name, timeout=200):
        for mine, expected in zip(ours, torchs, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def compressed(rank, world_size, spec, rate=0.1):
    """Ours inside a stream of its own, and the same compressor hooked on torch's."""
    torch.cuda.set_device(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        ours = gradwire.DistributedDataParallel(Net().cuda(), compressor=spec, gradient_as_bucket_view=True)
        mine = trained(ours, rank, changing=False, rate=rate)
    theirs = TorchDDP(Net().cuda())
    handle = gradwire.attach(theirs, spec)
    expected = trained(theirs, rank, changing=False, rate=rate)
    handle.close()
    ours.compression.close()
    return mine, expected


@pytest.mark.parametrize("spec", SPECS)
def test_a_compressor_inside_gives_what_it_gives_hooked_on_torch_s(ranks, spec):
    answers = ranks.run(compressed, 2, spec, timeout=200)
    for mine, expected in answers:
        for ours, torchs, first in zip(mine, expected, answers[0][0], strict=True):
            assert torch.equal(ours, first)
            torch.testing.assert_close(ours, torchs, rtol=1e-3, atol=1e-3)


def normalized(rank, world_size):
    torch.cuda.set_device(0)
    group = nccl(rank)
    nets = [nn.SyncBatchNorm.convert_sync_batchnorm(Net(norm=True), group).cuda() for _ in range(2)]
    kinds = gradwire.DistributedDataParallel, TorchDDP
    return [trained(kind(net, process_group=group), rank, False) for kind, net in zip(kinds, nets, strict=True)]


@needs_nccl
def test_synchronized_batch_norm_trains_as_in_torch_s(ranks):
    for ours, torchs in ranks.run(normalized, 1, timeout=200):
        for mine, expected in zip(ours, torchs, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
