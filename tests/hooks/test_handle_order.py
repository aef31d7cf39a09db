"""A handle's methods in unusual orders: nothing held back is lost, and what cannot be is refused."""

import copy

import torch

import gradwire
from gradwire.hooks.torch_ddp import compress_bucket, handle_for

from ..ddp_core.errors import message_of
from .given import SHAPES, attached, average, gradients, same, steps, wrapped

ZEROS = [torch.zeros(shape) for shape in SHAPES]


def trained(spec, rank, count=3):
    ddp, handle = attached(spec)
    steps(ddp, rank, 0, count)
    return ddp, handle


def load_then_bind(rank, world_size):
    ddp, handle = trained("onebit", rank)
    saved = copy.deepcopy(handle.state_dict())
    again = wrapped(SHAPES, bucket_cap_mb=0.002, find_unused_parameters=False)
    unnamed = gradwire.Handle("onebit")
    again.register_comm_hook(unnamed, compress_bucket)
    unnamed.load_state_dict(saved)
    unnamed.bind(again)
    found = [average(model, gradients(rank, 3, SHAPES)) for model in (ddp, again)]
    handle.close()
    unnamed.close()
    return same(*found)


def test_binding_after_loading_keeps_what_was_loaded(ranks):
    assert ranks.run(load_then_bind, 2) == [True, True]


def refused(rank, world_size):
    ddp, handle = trained("topk", rank)
    saved = handle.state_dict()
    handle.swap("onebit")
    wrong = handle.state_dict()
    wrong["parameters"]["p1"]["carried_over"] = torch.zeros(7)
    other = gradwire.Handle("topk")
    other.load_state_dict({**saved, "parameters": {"stranger": {"residual": torch.zeros(3)}}, "tensors": 1})
    loaded = handle_for("topk", ddp.module)
    loaded.load_state_dict({**saved, "buckets": [[], *saved["buckets"]]})
    messages = [
        message_of(handle.load_state_dict, wrong),
        message_of(other.bind, ddp.module),
        message_of(loaded.rescale, 2.0),
        message_of(lambda: (loaded.swap("onebit"), loaded.state_dict())),
        message_of(handle.rescale, float("inf")),
        message_of(gradwire.Handle("topk").load_state_dict, [saved], resize=True),
    ]
    handle.close()
    return messages


def test_what_would_lose_or_spoil_something_is_refused(ranks):
    words = ["p1", "stranger", "loaded", "loaded", "finite", "handle.bind(model)"]
    for messages in ranks.run(refused, 2):
        assert all(word in message for word, message in zip(words, messages, strict=True)), messages


def count_through_swaps(rank, world_size):
    ddp, handle = trained("none", rank)
    before = handle.stats().total.traffic.payload_bytes
    handle.swap("bf16")
    average(ddp, ZEROS)
    after = handle.stats().total.traffic.payload_bytes
    handle.close()
    return before, after


def test_totals_go_on_through_a_swap(ranks):
    dense = 4 * sum(zeros.numel() for zeros in ZEROS)
    for before, after in ranks.run(count_through_swaps, 2):
        assert before == 3 * dense
        assert after == before + dense // 2
