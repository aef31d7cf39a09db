"""Averages under every wrapper: those of float64, the same bits on all ranks, and no other bit where replies come late."""

from datetime import timedelta

import pytest
import torch
from torch import nn

import gradwire
from gradwire.compress import compressors
from gradwire.compress.shards.reduction import shard_sum
from gradwire.compress.shards.weights import weight_gather

from ...ddp_core.errors import message_of
from ...late import Late
from ..fsdp.given import GivenParts
from ..given import same
from .wrappers import EVERY, WHOLE, WRAPPERS, Training, means, over

STEPS, LIMIT = 3, timedelta(seconds=30)
BITS = {"none": 24, "bf16": 8, "int8": 8}  # of a sign and a fraction, which numbers of the largest magnitude have
BESIDE = {"HSDP": {"reduce": "none"}, "FSDP2 of replicas": {"gather": "int8"}}  # options that change no average


def averages(wrapper, spec, **options):
    """Of each step, by parameters that are not zero: the losses, too, which hang on weights that are gathered."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GivenParts()
        for each in model.parameters():
            nn.init.normal_(each)
    losses = []
    model.register_forward_hook(lambda _, given, loss: losses.append(loss.detach().clone()))
    training = Training(wrapper, spec, model, **options)
    found = [training.step(number) for number in range(STEPS)]
    training.close()
    return found, losses


def exact(rank, world_size, wrapper):
    return {spec: averages(wrapper, spec, **BESIDE.get(wrapper, {}))[0] for spec in BITS}


@over(*WRAPPERS, "FSDP2 of replicas", quick=["HSDP"])
def test_averages_are_those_of_float64_to_their_rounding_and_alike_on_all_ranks(ranks, wrapper):
    world_size = EVERY[wrapper].world_size
    answers = ranks.run(exact, world_size, wrapper)
    for spec, bits in BITS.items():
        for number, step in enumerate(answers[0][spec]):
            largest = 4.5 * max(1, world_size / 2)  # of normal numbers, and of sums that are divided afterwards
            for name, mean in means([number], world_size).items():
                off = (step[name].double() - mean).abs().max()
                assert off <= 2 * largest * 2.0**-bits, (spec, name)  # rounded when it is sent and as a mean
                assert bits == 24 or off > 0, (spec, name)
        assert all(same(each[spec], answers[0][spec]) for each in answers)


def closed(rank, world_size, wrapper):
    """The averages of a step behind a closed handle, and the error while a second one is there."""
    training = Training(wrapper)
    training.step(0)
    training.close()
    arguments = {"replicate": {"compressor": "none"}, "replicas": {"replicas": "none"}}.get(wrapper, {})
    second = gradwire.attach(training.model, **arguments)
    training.close()
    told = message_of(gradwire.attach, training.model, **arguments)
    second.close()
    return training.step(1), told


@over(leave_out=["attach", "comm_hook", "own"])
def test_after_close_torch_averages_by_itself_and_a_second_close_ends_no_other_handle(ranks, wrapper):
    world_size = WRAPPERS[wrapper].world_size
    for averages, told in ranks.run(closed, world_size, wrapper):
        assert "attach once" in told
        for name, mean in means([1], world_size).items():
            torch.testing.assert_close(averages[name].double(), mean, rtol=0, atol=1e-6)


def taken_by(check):
    """The compressors that a check does not refuse."""
    return [name for name in compressors() if not message_of(check, name)]


FEW = ["none", "int8", "topk:ratio=0.1", "powersgd:rank=2"]
SUMMED, GATHERED = taken_by(shard_sum), [*taken_by(weight_gather), "int4:send=weights"]
TWO_LEVELS = [("hosts:ranks=2,inside=int8+int4", {"gather": "hosts:ranks=2+int4"})]
PAIRS = [("none", "none"), ("bf16", "bf16"), ("onebit", "int4"), ("int8", "int4:send=weights")]
CASES = {  # (wrapper, ranks, specifications with options, marks)
    **{name: (name, 2, [(spec, {}) for spec in FEW], ()) for name in (*WHOLE, "replicas")},
    "FSDP2": ("FSDP2", 2, [(spec, {"gather": gather}) for spec, gather in PAIRS], ()),
    "FSDP2, hosts": ("FSDP2", 4, TWO_LEVELS, ()),
    "HSDP": ("HSDP", 4, [("powersgd:rank=2", {})], (pytest.mark.slow,)),
    "own, all": ("own", 2, [(spec, {}) for spec in compressors()], (pytest.mark.thorough,)),
    "FSDP2, sums": ("FSDP2", 2, [(spec, {}) for spec in SUMMED], (pytest.mark.thorough,)),
    "FSDP2, weights": ("FSDP2", 2, [("none", {"gather": spec}) for spec in GATHERED], (pytest.mark.thorough,)),
}


def in_time_and_late(rank, world_size, wrapper, asked):
    """For each specification whether replies that come late, and are NaN until then, change nothing."""
    found, decorated = {}, []

    def late(inner):
        decorated.append(Late(inner, LIMIT))
        return decorated[-1]

    for spec, options in asked:
        expected = averages(wrapper, spec, **options)
        decorated.clear()
        found[spec, str(options)] = same(averages(wrapper, spec, transport=late, **options), expected)
        assert any(each.carried for each in decorated)
        assert all(loss.isfinite() for loss in expected[1])
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=(*WRAPPERS[wrapper].marks, *marks)) for name, (wrapper, _, _, marks) in CASES.items()],
)
def test_late_replies_change_no_bit(ranks, case):
    wrapper, world_size, asked, _ = CASES[case]
    for found in ranks.run(in_time_and_late, world_size, wrapper, asked, timeout=100):
        assert all(found.values()), found


def test_every_codec_of_two_shots_is_taken_of_shards():
    assert {"none", "int8", "onebit"} <= {*GATHERED} & {*SUMMED}
