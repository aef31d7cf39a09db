import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

SPECS = ["none", "fp16+powersgd:rank=1", "powersgd:start_iter=3", "topk", "onebit"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def trained(rank, spec, steps=5, net=None, start=0, state=None, handles=None, poison=None, undo=False):
    ddp = DistributedDataParallel(net or network(), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
    handle = gradwire.attach(ddp, spec, undo=undo) if spec else None
    if state is not None:
        handle.load_state_dict(state)
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(100 * rank + step)
        inputs = torch.randn(8, 50, generator=generator)
        loss = ddp(inputs).square().mean() * (float("inf") if step == poison and rank == 0 else 1.0)
        loss.backward()
        with torch.no_grad():
            finite = all(p.grad.isfinite().all() for p in ddp.parameters())
            for parameter in ddp.parameters() if finite else ():
                parameter.sub_(0.1 * parameter.grad)
        ddp.zero_grad()
    if handles is not None:
        handles.append(handle)
    return ddp.module


def flat(net):
    return torch.cat([parameter.detach().view(-1) for parameter in net.parameters()])


def train_all(rank, world_size):
    results = {spec: flat(trained(rank, spec)) for spec in SPECS}
    return results, flat(trained(rank, None))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_end_with_the_same_bits_and_none_equals_torch(ranks, world_size):
    answers = ranks.run(train_all, world_size)
    for results, torch_s_own in answers:
        assert torch.equal(results["none"], torch_s_own)
        for spec in SPECS:
            assert torch.equal(results[spec], answers[0][0][spec])
            assert results[spec].isfinite().all()


def resumed(rank, world_size, spec):
    whole = trained(rank, spec, steps=6)
    handles = []
    half = trained(rank, spec, steps=3, handles=handles)
    state = copy.deepcopy(handles[0].state_dict())
    return flat(whole), flat(trained(rank, spec, steps=3, net=half, start=3, state=state))


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "batched-powersgd", "topk:ratio=0.05", "onebit"])
def test_resuming_is_bit_identical_to_not_stopping(ranks, spec):
    for whole, stopped in ranks.run(resumed, 2, spec):
        assert torch.equal(whole, stopped)


def different_specs(rank, world_size):
    trained(rank, "topk" if rank else "onebit", steps=1)


def test_different_specs_are_an_error_on_every_rank(ranks):
    failures = ranks.run(different_specs, 2, expect_errors=True)
    assert all("set up differently" in failure.message for failure in failures)


def overflow(rank, world_size):
    handles = []
    trained(rank, "powersgd:rank=2", steps=4, handles=handles, poison=3, undo=True)
    before = []
    trained(rank, "powersgd:rank=2", steps=3, handles=before)
    after, expected = handles[0].state_dict()["parameters"], before[0].state_dict()["parameters"]
    return all(torch.equal(after[name][field], expected[name][field]) for name in after for field in after[name])


def test_a_non_finite_step_leaves_all_state_as_it_was(ranks):
    assert all(ranks.run(overflow, 2))


class TwoTypes(nn.Module):
    """Buckets of two dtypes, all of which torch hands over in the first step of a static graph."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(6, 6)
        self.narrow = nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, inputs):
        return self.narrow(self.wide(inputs).bfloat16()).float()


def steps_of_a_static_graph(rank, world_size):
    model = DistributedDataParallel(TwoTypes(), static_graph=True)
    handle = gradwire.attach(model, "topk:ratio=0.1")
    counted = []
    for _ in range(3):
        model(torch.full((3, 6), rank + 1.0)).square().sum().backward()
        counted.append((handle.stats().steps, handle.state_dict()["step"]))
    handle.close()
    return counted


def test_the_first_step_of_a_static_graph_is_one_step_however_many_buckets_it_has(ranks):
    assert ranks.run(steps_of_a_static_graph, 2) == [[(1, 1), (2, 2), (3, 3)]] * 2


def steps_with_one_input(rank, world_size):
    model = DistributedDataParallel(TwoTypes(), static_graph=True)
    handle = gradwire.attach(model, "topk:ratio=0.1")
    with model.join():
        for _ in range(1 if rank == 0 else 4):
            model(torch.full((3, 6), rank + 1.0)).square().sum().backward()
    steps = handle.stats().steps
    handle.close()
    return steps


def test_a_rank_with_one_input_counts_the_others_steps_of_a_static_graph(ranks):
    assert ranks.run(steps_with_one_input, 2) == [4, 4]
