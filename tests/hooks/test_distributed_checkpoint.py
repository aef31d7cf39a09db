"""torch.distributed.checkpoint: the state of each rank under a key of its own comes back, or is refused, never dropped."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp

import gradwire

from .given import average, gradients, same, wrapped

SHAPES = ((40, 30), (40,), (10, 200), (3,))


def attached(spec):
    ddp = wrapped(SHAPES, bucket_cap_mb=0.002, find_unused_parameters=False)
    return ddp, gradwire.attach(ddp, spec)


def steps(ddp, rank, first, last):
    return [average(ddp, gradients(rank, step, SHAPES)) for step in range(first, last)]


def resumed(rank, world_size, spec, folder, packed):
    """Averages after a resume, and as they should be; or the error of the load. `packed`: as one value."""
    ddp, handle = attached(spec)
    steps(ddp, rank, 0, 3)
    buffer, key = io.BytesIO(), f"compression-{rank}"
    torch.save(handle.state_dict(), buffer)
    dcp.save({key: buffer.getvalue() if packed else handle.state_dict()}, checkpoint_id=folder)
    again, other = attached(spec)
    state = {key: b"" if packed else other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    loaded = torch.load(io.BytesIO(state[key]), weights_only=True) if packed else state[key]
    try:
        other.load_state_dict(loaded)
    except ValueError as error:
        return str(error)
    alike = same(steps(ddp, rank, 3, 6), steps(again, rank, 3, 6))
    handle.close()
    other.close()
    return alike


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "powersgd:rank=2", "fp16+powersgd:rank=1", "bf16"])
def test_what_is_kept_by_parameter_comes_back_to_the_bit(ranks, spec, tmp_path):
    assert ranks.run(resumed, 2, spec, str(tmp_path), packed=False) == [True, True]


def test_what_is_kept_by_bucket_is_refused_where_it_was_dropped(ranks, tmp_path):
    for message in ranks.run(resumed, 2, "onebit", str(tmp_path), packed=False):
        assert "such as the bytes that torch.save makes of it" in message


def one_key(rank, world_size, folder):
    """What ranks get of states that were saved under one key, as if they were one."""
    ddp, handle = attached("topk:ratio=0.05")
    steps(ddp, rank, 0, 3)
    dcp.save({"compression": handle.state_dict()}, checkpoint_id=folder)
    state = {"compression": attached("topk:ratio=0.05")[1].state_dict()}
    dcp.load(state, checkpoint_id=folder)
    try:
        handle.load_state_dict(state["compression"])
    except ValueError as error:
        return str(error)
    return "accepted"


def test_of_one_key_for_all_ranks_only_one_accepts_the_state(ranks, tmp_path):
    answers = sorted(ranks.run(one_key, 2, str(tmp_path)))
    assert answers[0] == "accepted"
    assert "save and load one file per rank" in answers[1]
