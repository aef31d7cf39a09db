"""The memory of a step beside gradients and state, counted by a dry run."""

import pytest
import torch

from gradwire.compress import Layout, Ranks, compressor
from gradwire.compress.simulate import work_memory

RANKS, SIZE = 4, 128 * 1024
BYTES = {"int8": SIZE * (1 + 4 / 128), "int4": SIZE * (1 / 2 + 4 / 128)}  # of a payload, scales included
WIDE = 4 * SIZE  # bytes of all numbers in float32


def second(payload):
    """Bytes when a rank encodes its part: all ranks' votes for it, the part in float32, and what it sends."""
    return payload + WIDE / RANKS + payload / RANKS


@pytest.mark.parametrize(
    ("spec", "waiting", "most"),
    [
        ("none", 0, 0),
        ("bf16", WIDE / 2, WIDE / 2),
        *((spec, 2 * sent, max(2 * sent, second(sent))) for spec, sent in BYTES.items()),
        (
            "int8:error_feedback=1,residual_bits=8",
            2 * BYTES["int8"],
            WIDE + BYTES["int8"],
        ),  # the residual in float32 beside a payload
        ("int8:error_feedback=1,residual_bits=8,start_iter=9", 2 * BYTES["int8"], WIDE + BYTES["int8"]),
        ("int4:residual_bits=8", 2 * BYTES["int4"], WIDE + BYTES["int4"]),
    ],
)
def test_payloads_replies_and_temporary_tensors_are_counted(spec, waiting, most):
    layout = Layout(("w",), ((1024, 128),), torch.float32, torch.device("cpu"), Ranks(RANKS))
    found = work_memory(compressor(spec), layout)
    assert (found.waiting, found.most) == (int(waiting), int(most))


def test_a_residual_that_is_needed_after_a_reply_stays_in_float32_until_then():
    layout = Layout(("w",), ((1024, 128),), torch.float32, torch.device("cpu"), Ranks(RANKS))
    assert work_memory(compressor("powersgd:rank=1,residual_bits=8"), layout).waiting >= WIDE
