"""`join`: ranks with fewer inputs do for the others what torch's DDP does."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

import gradwire

from ..torch_versions import buffers_by_argument
from .both import KINDS, assert_all_same, assert_same, batches, both, mlp, seeded


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


class WithUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return self.always(x) + self.sometimes(x) if x.sum() > 0 else self.always(x)


NETS = {"plain": mlp, "buffers": WithBuffers, "unused": WithUnused}
KEPT = "buffers kept"
CASES = {
    "plain": ("plain", {}, {}),
    "no inputs at all": ("plain", {}, {"fewest": 0}),
    "small buckets": ("plain", {"bucket_cap_mb": 0.01}, {}),
    "buffers": ("buffers", {}, {}),
    KEPT: ("buffers", {"forward_sync_buffers": False}, {}),
    "unused parameters": ("unused", {"find_unused_parameters": True}, {}),
    "static graph": ("plain", {"static_graph": True}, {}),
    "accumulation": ("plain", {}, {"sync_every": 3}),
    "over the ranks that are left": ("plain", {}, {"join": {"divide_by_initial_world_size": False}}),
    "even inputs, not enabled": ("plain", {}, {"fewest": 6, "join": {"enable": False}}),
}


def uneven(rank, world_size, ddp, case):
    net, options, settings = CASES[case]
    model = ddp(seeded(NETS[net]), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every, least = settings.get("sync_every", 1), settings.get("fewest", 3)
    inputs = batches(rank, least if rank == 0 else 6, 5, 8)
    with model.join(**settings.get("join", {})):
        for step, each in enumerate(inputs):
            synced = step % every == every - 1
            with nullcontext() if synced else model.no_sync():
                model(each).square().mean().backward()
            if synced:
                optimizer.step()
                optimizer.zero_grad()
    return {name: each.clone() for name, each in model.state_dict().items()}


def test_the_model_at_the_end_is_torchs_and_the_same_on_all_ranks(ranks):
    ours = assert_all_same(ranks, uneven, [case for case in CASES if case != KEPT], rtol=1e-6, atol=1e-7)
    for first, second in ours.values():
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@buffers_by_argument
def test_so_it_is_but_for_buffers_that_are_kept(ranks):
    ours = assert_same(ranks, uneven, KEPT, rtol=1e-6, atol=1e-7)
    first, second = ({name: each for name, each in state.items() if "norm" not in name} for state in ours)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_three_ranks_may_end_one_after_the_other(ranks):
    assert_same(ranks, staggered, world_size=3, rtol=1e-6, atol=1e-7)


def staggered(rank, world_size, ddp):
    model = ddp(seeded(mlp), bucket_cap_mb=0.01)
    return trained(model, batches(rank, 1 + 2 * rank, 5, 8), divide_by_initial_world_size=False)


def trained(model, inputs, **join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(**join):
        for each in inputs:
            optimizer.zero_grad()
            model(each).square().mean().backward()
            optimizer.step()
    return {name: each.clone() for name, each in model.state_dict().items()}


def early_end(rank, world_size, ddp):
    model = ddp(seeded(mlp))
    count = 0
    try:
        with model.join(throw_on_early_termination=True):
            for each in batches(rank, 2 + rank, 5, 8):
                model(each).sum().backward()
                count += 1
    except RuntimeError as error:
        return count, str(error)
    return count, None


def test_all_ranks_raise_once_one_has_no_inputs_if_they_shall(ranks):
    theirs, ours = both(ranks, early_end)
    assert ours == theirs
    assert [count for count, _ in ours] == [2, 2]


def with_a_hook(rank, world_size, ddp):
    model = ddp(seeded(mlp))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    gradients = []
    with model.join(divide_by_initial_world_size=False):
        for each in batches(rank, 2 + rank, 5, 8):
            model.zero_grad()
            model(each).sum().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    return gradients


def test_a_hooks_averages_are_not_divided_again(ranks):
    assert_same(ranks, with_a_hook)


def compressed(rank, world_size, specs):
    models = [gradwire.DistributedDataParallel(seeded(mlp), compressor=spec) for spec in specs]
    states = [trained(model, batches(rank, 2 + 3 * rank, 5, 8)) for model in models]
    return states, [model.compression.stats().steps for model in models]


def test_a_compressor_goes_on_while_one_rank_has_no_inputs(ranks):
    first, second = ranks.run(compressed, 2, ["bf16", "powersgd:rank=2", "topk:ratio=0.1", "onebit"])
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert first[1] == [5] * 4


class Counter(Joinable):
    """Something else that takes part in `join`."""

    def __init__(self):
        super().__init__()
        self.shadowed = 0

    def join_hook(self, **kwargs):
        counter = self

        class Hook(JoinHook):
            def main_hook(self):
                counter.shadowed += 1

        return Hook()

    join_device = torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


def joined_with_another(rank, world_size, kind):
    model, counter = KINDS[kind](seeded(mlp)), Counter()
    with Join([model, counter]):
        for each in batches(rank, 2 + rank, 5, 8):
            model(each).sum().backward()
    return counter.shadowed


def test_other_joinables_may_take_part(ranks):
    assert ranks.run(joined_with_another, 2, "gradwire") == ranks.run(joined_with_another, 2, "torch") == [1, 0]
