"""The states of all ranks as one, gathered on rank 0 and scattered: in the same bits, or by the rule for another number."""

from datetime import timedelta

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import gradwire
from gradwire.ddp_core.transport import lost_ranks

from ..ddp_core.errors import logged, message_of
from .given import attached, same, steps, through_file

SPECS = ["powersgd:rank=2", "topk:ratio=0.05", "onebit:error_feedback=1", "bf16"]


def trained(rank, world_size, folder):
    """The state after three steps, by specification, and what is gathered; saved by torch.distributed.checkpoint, too."""
    answers = {}
    for spec in SPECS:
        ddp, handle = attached(spec)
        steps(ddp, rank, 0, 3)
        gathered = through_file(handle.gather_state_dict())
        dcp.save({"compression": gradwire.GatheredState(handle)}, checkpoint_id=f"{folder}/{spec}")
        answers[spec] = handle.state_dict(), gathered
        handle.close()
    return answers


def scattered(rank, world_size, saved, folder):
    """By specification: the states after both loads."""
    answers = {}
    for spec in SPECS:
        _, handle = attached(spec)
        handle.scatter_state_dict(saved[spec] if rank == 0 else {})
        _, other = attached(spec)
        dcp.load({"compression": gradwire.GatheredState(other)}, checkpoint_id=f"{folder}/{spec}")
        answers[spec] = handle.state_dict(), other.state_dict()
        handle.close()
        other.close()
    return answers


def resized(rank, world_size, states):
    """The states of handles that were given those of all old ranks."""
    answers = {}
    for spec in SPECS:
        _, handle = attached(spec)
        handle.load_state_dict(states[spec], resize=True)
        answers[spec] = handle.state_dict()
    return answers


@pytest.fixture(scope="module")
def before(ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return ranks.run(trained, 2, folder), folder


def test_on_another_number_of_ranks_each_goes_on_as_from_the_states_of_all(ranks, before):
    old, folder = before
    saved = {spec: old[0][spec][1] for spec in SPECS}
    states = {spec: [answers[spec][0] for answers in old] for spec in SPECS}
    expected = ranks.run(resized, 3, states)
    for rank, answers in enumerate(ranks.run(scattered, 3, saved, folder)):
        for spec, loaded in answers.items():
            assert same(loaded, (expected[rank][spec],) * 2), spec


def refused(rank, world_size, saved):
    _, handle = attached("onebit:error_feedback=1")
    before = handle.state_dict()
    wrong = (saved["topk:ratio=0.05"], {}, handle.state_dict(), None)
    messages = [message_of(handle.scatter_state_dict, each) for each in wrong]
    with pytest.raises(ValueError, match="scatter_state_dict"):
        handle.load_state_dict(saved["onebit:error_feedback=1"])
    return messages, same(before, handle.state_dict())


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_does_not_fit_is_refused_on_all_ranks(ranks, before, world_size):
    old, _ = before
    for messages, unchanged in ranks.run(refused, world_size, {spec: old[0][spec][1] for spec in SPECS}):
        assert unchanged
        assert all(message.startswith("ValueError") for message in messages)
        assert "swap()" in messages[0]
        assert all("gather_state_dict()" in message for message in messages[1:])


def alone(rank, world_size, call):
    """What one rank logs and raises where the others do not call; and whether all come through when all do, late."""
    _, handle = attached("onebit")
    limit, handle.averager.engines.timeout = handle.averager.engines.timeout, timedelta(seconds=1.5)
    patience, lost_ranks.PATIENCE = lost_ranks.PATIENCE, 0.2
    with logged(name=lost_ranks.__name__) as lines:
        told = message_of(getattr(handle, call), *([{}] if "scatter" in call else [])) if rank == 1 else ""
        dist.barrier()
    lost_ranks.PATIENCE, handle.averager.engines.timeout = patience, limit
    together = handle.gather_state_dict()
    return told, lines, len(together.get("ranks", ()))


@pytest.mark.parametrize("call", ["gather_state_dict", "scatter_state_dict"])
def test_a_rank_that_calls_alone_names_those_that_do_not(ranks, call):
    answers = ranks.run(alone, 3, call)
    for told in (answers[1][0], *answers[1][1]):
        assert "ranks [0, 2], which have not" in told
        assert f"all ranks must call {call}()" in told
    assert len(answers[1][1]) == 1
    assert answers[1][0].startswith("RuntimeError: gave up")
    assert [all_of_them for _, _, all_of_them in answers] == [3, 0, 0]  # when all call, it works again
