"""torch.distributed.checkpoint: the state of each rank under a key of its own comes back, or is refused, never dropped."""

import torch.distributed.checkpoint as dcp

from ..ddp_core.errors import message_of
from .given import attached, steps


def by_bucket(rank, world_size, folder):
    """The error of a load of what is kept by bucket, saved as tensors."""
    ddp, handle = attached("onebit")
    steps(ddp, rank, 0, 3)
    key = f"compression-{rank}"
    dcp.save({key: handle.state_dict()}, checkpoint_id=folder)
    _, other = attached("onebit")
    dcp.load(state := {key: other.state_dict()}, checkpoint_id=folder)
    message = message_of(other.load_state_dict, state[key])
    handle.close()
    other.close()
    return message


def test_what_is_kept_by_bucket_is_refused_where_it_was_dropped(ranks, tmp_path):
    for message in ranks.run(by_bucket, 2, str(tmp_path)):
        assert "such as the bytes that torch.save makes of it" in message


def one_key(rank, world_size, folder):
    """What ranks get of states that were saved under one key, as if they were one."""
    ddp, handle = attached("topk:ratio=0.05")
    steps(ddp, rank, 0, 3)
    dcp.save({"compression": handle.state_dict()}, checkpoint_id=folder)
    state = {"compression": attached("topk:ratio=0.05")[1].state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return message_of(handle.load_state_dict, state["compression"])


def test_of_one_key_for_all_ranks_only_one_accepts_the_state(ranks, tmp_path):
    accepted, refused = sorted(ranks.run(one_key, 2, str(tmp_path)))
    assert not accepted
    assert "save and load one file per rank" in refused
