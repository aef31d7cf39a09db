"""skip_all_reduce_unused_params: what no rank used is not sent (Li et al. 2020, section 6.2.2)."""

import pytest
import torch
from torch import nn

import gradwire

from ...faulty import Fault, faulty
from ..layers import CAP, DYNAMIC, LAYER, Layers, gradients_of, inputs_of
from ..nets import same

STEPS = [(0, 1, 2, 3), (1, 3), (0,), (2,), (), (3, 2, 1, 0)]


def payloads(rank, world_size, compressor, cap):
    """Bytes that each step sent, and how many buckets."""
    options = {**DYNAMIC, "bucket_cap_mb": cap, "skip_all_reduce_unused_params": True}
    model = gradwire.DistributedDataParallel(Layers(), compressor=compressor, **options)
    sent = []
    for step, used in enumerate(STEPS):
        before = model.compression.stats().total.traffic
        model(inputs_of(rank, step), used).square().sum().backward()
        after = model.compression.stats().total.traffic
        sent.append((after.payload_bytes - before.payload_bytes, after.rounds - before.rounds))
    return sent


def test_buckets_that_no_rank_used_are_not_sent(ranks):
    for sent in ranks.run(payloads, 2, "none", CAP):
        assert sent == [(LAYER * len(used), len(used)) for used in STEPS]


def test_inside_a_bucket_parameters_that_no_rank_used_are_not_sent(ranks):
    for sent in ranks.run(payloads, 2, "none", None):
        assert sent == [(LAYER * len(used), int(bool(used))) for used in STEPS]


def test_a_compressor_is_given_whole_buckets_but_none_that_no_rank_used(ranks):
    for sent in ranks.run(payloads, 2, "topk:ratio=0.5", 2 * CAP):
        halves = [len({index // 2 for index in used}) for used in STEPS]
        whole = sent[0][0] // 2
        assert [payload for payload, _ in sent] == [half * whole for half in halves]


def hooked(rank, world_size):
    """Steps that a handle counts which is a communication hook of ours, where each step sends another bucket alone."""
    model = gradwire.DistributedDataParallel(Layers(), **DYNAMIC, skip_all_reduce_unused_params=True)
    model.register_comm_hook(None, gradwire.comm_hook("topk:ratio=0.5"))
    handle = gradwire.handle_of(model)
    for step, index in enumerate((3, 2, 1, 0)):
        model(inputs_of(rank, step), (index,)).square().sum().backward()
    return handle.state_dict()["step"]


def test_a_handle_that_is_a_hook_counts_steps_though_each_sends_another_bucket(ranks):
    assert ranks.run(hooked, 2) == [4, 4]


def labelled(rank, world_size):
    """The error of a step that sends bucket 2 alone."""
    fails = faulty(Fault("raise", rank, turn=4))  # in the second step, after four buckets
    options = {**DYNAMIC, "skip_all_reduce_unused_params": True}
    model = gradwire.DistributedDataParallel(Layers(), compressor="topk:ratio=0.5", transport=fails, **options)
    model(inputs_of(rank), (0, 1, 2, 3)).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"^bucket 2 \(parameters layers\.1\."):
        model(inputs_of(rank), (1,)).square().sum().backward()


def test_an_error_names_the_bucket_by_its_place_among_all(ranks):
    ranks.run(labelled, 2)


def one_sided(rank, world_size, compressor):
    """Rank 0 uses layers 0 and 1, rank 1 layers 1 and 2; nobody uses layer 3."""
    model = gradwire.DistributedDataParallel(
        Layers(), compressor=compressor, find_unused_parameters=True, skip_all_reduce_unused_params=True
    )
    for step in range(3):
        model(inputs_of(rank, step), (rank, rank + 1)).square().sum().backward()
    return model.compression.stats().last.traffic.payload_bytes, gradients_of(model)


@pytest.mark.parametrize("compressor", ["none", "powersgd:rank=2"])
def test_ranks_that_use_different_layers_send_all_that_any_of_them_used(ranks, compressor):
    answers = ranks.run(one_sided, 2, compressor)
    for sent, gradients in answers:
        assert compressor != "none" or sent == 3 * LAYER
        assert gradients[6:] == [None, None]
        assert same(gradients, answers[0][1])


class Random(nn.Module):
    """Each rank drops layers of its own choice."""

    def __init__(self):
        super().__init__()
        self.net = Layers()

    def forward(self, inputs, generator):
        kept = torch.rand(4, generator=generator) < 0.4
        return self.net(inputs, kept.nonzero().view(-1).tolist())


def train_dropping(rank, world_size, skip, compressor):
    """Parameters, and the gradient that came back over all steps, after a last one that brings out what was held back."""
    model = gradwire.DistributedDataParallel(
        Random(), compressor=compressor, **DYNAMIC, skip_all_reduce_unused_params=skip
    )
    generator = torch.Generator().manual_seed(rank)
    for step in range(70 if compressor == "none" else 20):  # once past the interval at which the order is looked at
        model.zero_grad()
        model(inputs_of(rank, step), generator).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("compressor", ["none", "powersgd:rank=2"])
def test_training_with_dropped_layers_is_the_same_whether_they_are_sent_or_not(ranks, compressor):
    (sent, others), (dropped, dropped_there) = (
        ranks.run(train_dropping, 2, skip, compressor) for skip in (False, True)
    )
    for left, right, there, here in zip(sent, dropped, others, dropped_there, strict=True):
        assert torch.equal(left, there)
        assert torch.equal(right, here)
        torch.testing.assert_close(left, right, rtol=0, atol=0 if compressor == "none" else 1e-12)
