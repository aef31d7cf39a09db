"""Training that goes on with more ranks or fewer: nothing held back is lost, and a rank that fell behind is named."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import Given, average, gradients, same, wrapped

SHAPES = ((40, 30), (40,), (10, 200), (3,))
ZEROS = [torch.zeros(shape) for shape in SHAPES]
SPECS = [
    "topk:ratio=0.05",
    "onebit:error_feedback=1",
    "fp16",
    "powersgd:rank=2,start_iter=2",
]


def attached(spec):
    ddp = wrapped(SHAPES, bucket_cap_mb=0.002, find_unused_parameters=False)
    return ddp, gradwire.attach(ddp, spec)


def flushed(ddp, handle):
    """All that is held back: the average of zeros once nothing compresses."""
    handle.swap("none")
    averages = average(ddp, ZEROS)
    handle.close()
    return averages


def trained(rank, world_size):
    """For each specification the state after three steps, and what comes out of it."""
    answers = {}
    for spec in SPECS:
        ddp, handle = attached(spec)
        for step in range(3):
            average(ddp, gradients(rank, step, SHAPES))
        answers[spec] = handle.state_dict(), flushed(ddp, handle)
    return answers


def refused(rank, world_size, states):
    _, handle = attached("onebit:error_feedback=1")
    before = handle.state_dict()
    later = {**states[0], "step": 4}
    unnamed = gradwire.Handle("onebit:error_feedback=1")
    bad = [
        states[0],
        [],
        states[:1],
        [states[0], states[0]],
        [*states, states[1]],
        [later, states[1]],
        [None, states[1]],
    ]
    bad.append([{**states[0], "rank": "0"}, states[1]])
    messages = []
    for each in bad:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            handle.load_state_dict(each, resize=True)
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match=r"handle\.bind\(model\)"):
        unnamed.load_state_dict(states, resize=True)
    return messages, same(before, handle.state_dict())


def test_states_that_are_not_those_of_all_ranks_are_refused(ranks):
    states = [answers["onebit:error_feedback=1"][0] for answers in ranks.run(trained, 2)]
    ((messages, unchanged),) = ranks.run(refused, 1, states)
    assert unchanged
    assert "different steps: [3, 4]" in messages[5]
    assert all("all ranks" in message for message in (*messages[:5], messages[6], messages[7]))


def one_behind(rank, world_size, spec, ours, late):
    """A first step after rank `late` did not load the parameters that the others did."""
    if ours:
        model = gradwire.DistributedDataParallel(Given(SHAPES), compressor=spec)
    else:
        model = TorchDDP(Given(SHAPES))
        gradwire.attach(model, spec)
    if rank != late:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
    average(model, gradients(rank, 0, SHAPES))


@pytest.mark.parametrize(("spec", "ours"), [("none", True), ("topk", False)])
def test_a_new_rank_that_loaded_nothing_is_named_at_the_first_step(ranks, spec, ours):
    for failure in ranks.run(one_behind, 3, spec, ours, 2, expect_errors=True):
        assert "rank 2 has" in failure.message
        assert "load the same checkpoint" in failure.message
