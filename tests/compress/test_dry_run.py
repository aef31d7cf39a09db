"""What a dry run says of the wire, against closed forms."""

import math

import pytest
import torch

from gradwire.compress import (
    AllGather,
    AllReduce,
    AllToAll,
    Dense,
    ErrorFeedback,
    Layout,
    Partition,
    PowerSGD,
    Ranks,
    ReduceScatter,
    Switch,
    Traffic,
    compressor,
    dry_run,
    most_rounds,
    simulate,
)
from gradwire.compress.algorithms.payload import padded
from gradwire.compress.simulate import STEADY, boundaries, rehearse, steady_traffic, traffic

from .given import gradients, layout, placed


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 64])
def test_sent_bytes_are_those_of_a_ring_and_of_direct_exchange(world_size):
    tensor = torch.empty(world_size, 6, dtype=torch.float16)
    size = 12 * world_size
    assert traffic(AllReduce(tensor), Ranks(world_size)) == Traffic(1, size, 2 * (world_size - 1) / world_size * size)
    assert traffic(AllGather(tensor), Ranks(world_size)) == Traffic(1, size, (world_size - 1) * size)
    for kind in (AllToAll, ReduceScatter):
        assert traffic(kind(tensor), Ranks(world_size)) == Traffic(1, size, (world_size - 1) / world_size * size)


SHAPES = ((64, 32), (7,), (16, 3, 3, 3), (1,), (5, 1))  # 2048 + 7 + 432 + 1 + 5 = 2493 elements
P_AND_WHOLE, Q = 2 * (64 + 16) + 13, 2 * (32 + 27)  # elements at rank 2
REDUCED = {  # specification: bytes of the payloads of each all-reduce
    "none": [4 * 2493],
    "fp16": [2 * 2493],
    "bf16": [2 * 2493],
    "powersgd:rank=2": [4 * P_AND_WHOLE, 4 * Q],
    "fp16+powersgd:rank=2": [2 * P_AND_WHOLE, 2 * Q],
    "powersgd:rank=2,power_iterations=2": [4 * P_AND_WHOLE, 4 * Q, 4 * (P_AND_WHOLE - 13), 4 * Q],
    "acp-powersgd:rank=2": [4 * P_AND_WHOLE],
    "randomk": [4 * (256 + 189)],  # 9 blocks and 189 elements behind them
    "randomk:ratio=0.1,block=16": [4 * (16 * 16 + 13)],  # 155 blocks and 13 elements behind them
    "chunktopk:ratio=0.1,chunk=16": [4 * 155, 4 * (16 * 16 + 13)],
    "bf16+chunktopk": [2 * 4, 2 * (512 + 445)],
}
GATHERED = {  # specification: bytes of the payload
    "topk:ratio=0.01": 208,  # 25 * 8, padded to a multiple of 16
    "topk:k=3": 32,  # 3 * 8
    "topk:k=3,value_dtype=fp16": 32,  # 3 * 6
    "dropping": 416,  # 8 + 50 * 8, padded: at most 2 % of the elements
    "adacomp": 208,  # 8 + 50 * 4
    "topk:k=10000": 19_968,  # 2493 * 8, padded to a multiple of 128
}
ROW_BITS = 16  # bytes of a bit for each of 87 rows, padded: also of a part of them
# By parameters there are 6 blocks of 1024, 42 of 64, 313 of 8 and 23 of 128: 2048 elements have 2 of 1024, 432 have 1.
TWO_SHOT = {  # (specification, ranks): bytes of a part of the bucket
    ("onebit", 1): 800 + ROW_BITS,  # 4 * 6 + 6 * 1024 // 8, padded to a multiple of 16
    ("onebit", 2): 400 + ROW_BITS,  # 4 * 3 + 3 * 128
    ("onebit", 4): 272 + ROW_BITS,  # 4 * 2 + 2 * 128
    ("onebit:rotate=false", 4): 272 + ROW_BITS,
    ("onebit:block=64", 4): 144 + ROW_BITS,  # 4 * 11 + 11 * 8
    ("onebit:block=8", 3): 528 + ROW_BITS,  # 4 * 105 + 105
    ("int8", 1): 23 * 128 + 4 * 23 + 4,
    ("int8:rotate=true", 4): 6 * 128 + 4 * 6 + 8 + ROW_BITS,
    ("int4", 2): 12 * 64 + 4 * 12,
    ("int2", 4): 6 * 32 + 4 * 6 + 8 + ROW_BITS,
    ("ternary", 4): 6 * 32 + 4 * 6 + 8,
    ("int8:block=1024", 4): 2 * 1024 + 4 * 2 + 8,
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
@pytest.mark.parametrize("spec", REDUCED)
def test_a_dry_run_of_all_reduces_counts_every_byte(spec, world_size):
    found, payloads = dry_run(compressor(spec), layout(*SHAPES, world_size=world_size)), REDUCED[spec]
    assert (found.rounds, found.payload_bytes) == (len(payloads), sum(payloads))
    assert found.sent_bytes == pytest.approx(2 * (world_size - 1) / world_size * sum(payloads), rel=1e-12)


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_one_matrix_of_a_whole_bucket_sends_a_bit_for_each_row(world_size):
    found = dry_run(compressor("batched-powersgd:rank=1"), layout(*SHAPES, world_size=world_size))
    factors = 4 * (47 + 2) + 4 * 53  # 47 x 53 and 2 left over
    assert (found.rounds, found.payload_bytes) == (3, factors + ROW_BITS)
    expected = 2 * (world_size - 1) / world_size * factors + (world_size - 1) * ROW_BITS
    assert found.sent_bytes == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
@pytest.mark.parametrize("spec", GATHERED)
def test_a_dry_run_of_a_gather_counts_every_byte(spec, world_size):
    found = dry_run(compressor(spec), layout(*SHAPES, world_size=world_size))
    assert found == Traffic(1, GATHERED[spec], (world_size - 1) * GATHERED[spec])


@pytest.mark.parametrize(("spec", "world_size"), TWO_SHOT)
def test_a_dry_run_of_two_shots_counts_every_byte(spec, world_size):
    row = TWO_SHOT[spec, world_size]
    found = dry_run(compressor(spec), layout(*SHAPES, world_size=world_size))
    assert found == Traffic(2, (world_size + 1) * row, 2 * (world_size - 1) * row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "spec", [*REDUCED, *GATHERED, "onebit", "onebit:block=64", "int8", "int4:rounding=stochastic", "ternary"]
)
def test_a_dry_run_counts_what_a_real_run_sends(spec, dtype):
    within, built = layout(*SHAPES, dtype=dtype, world_size=3), compressor(spec)
    sent = []

    def watched(program):
        reply = None
        while True:
            try:
                request = next(program) if reply is None else program.send(reply)
            except StopIteration:
                return
            sent.append(traffic(request, Ranks(3)))
            reply = yield request

    ranks = [placed(within, rank=rank) for rank in range(3)]
    simulate([watched(built.reduce(g, built.init(r))) for g, r in zip(gradients(within), ranks, strict=True)])
    total = sum(sent, Traffic())
    found = dry_run(built, within)
    assert (3 * found.rounds, 3 * found.payload_bytes) == (total.rounds, total.payload_bytes)
    assert 3 * found.sent_bytes == pytest.approx(total.sent_bytes)


def test_a_dry_run_costs_no_memory_and_switches_to_wide_indices():
    elements = 10**12
    huge = Layout(("w",), ((10**6, 10**6),), torch.float32, torch.device("cpu"), Ranks(2))
    assert dry_run(compressor("none"), huge).payload_bytes == 4 * elements
    assert dry_run(compressor("powersgd:rank=4"), huge).payload_bytes == 4 * 4 * 2 * 10**6
    assert dry_run(compressor("topk:ratio=0.001"), huge).payload_bytes == padded(12 * math.ceil(0.001 * elements))


def test_a_dry_run_is_of_the_steady_state_unless_a_step_is_given():
    built, within = compressor("powersgd:rank=2,start_iter=5,warmup=fp16"), layout(*SHAPES)
    assert dry_run(built, within) == dry_run(compressor("powersgd:rank=2"), within)
    assert [dry_run(built, within, step).payload_bytes for step in (0, 4)] == [2 * 2493] * 2
    assert dry_run(built, within, 5) == dry_run(built, within)


def test_the_steps_at_which_something_changes_are_found_at_any_depth():
    inner = Switch({0: Dense(), 7: PowerSGD()})
    split = Partition((("a", inner), ("b", ErrorFeedback(Switch({0: Dense(), 9: Dense()})))))
    assert boundaries(Dense()) == {0}
    assert boundaries(ErrorFeedback(Switch({0: split, 3: Dense()}))) == {0, 3, 7, 9}
    assert boundaries(compressor("fp16+powersgd:start_iter=4")) == {0, 4}


def test_the_most_rounds_are_those_of_any_stage_on_any_bucket():
    buckets = [layout((3,)), layout((64, 32))]
    late, early = Switch({0: Dense(), 7: PowerSGD()}), Switch({0: PowerSGD(power_iterations=2), 7: Dense()})
    assert [most_rounds(built, buckets) for built in (Dense(), late, early)] == [1, 2, 4]
    assert most_rounds(late, buckets[:1]) == 1


@pytest.mark.parametrize("spec", ["bf16", "powersgd:rank=2", "topk:ratio=0.1", "onebit:block=64"])
def test_a_rehearsal_on_a_device_asks_for_what_a_dry_run_does(spec):
    built, within = compressor(spec), layout(*SHAPES, world_size=4)
    assert rehearse(built, within, STEADY) == dry_run(built, within)


def test_steady_traffic_is_the_mean_of_two_steps_after_all_warm_ups():
    buckets = [layout((64, 32)), layout((7,), world_size=2)]
    expected = dry_run(compressor("topk"), buckets[0]) + dry_run(compressor("topk"), buckets[1])
    assert steady_traffic(compressor("topk:start_iter=9"), buckets) == expected
    sent = 4 * (64 + 32 + 7) + 8  # every second step a bit for each of 64 rows, in 16 bytes
    assert steady_traffic(compressor("acp-powersgd:rank=2"), buckets) == Traffic(2, sent, float(sent))


class ByName:
    """A compressor from elsewhere that goes by names."""

    def __init__(self):
        self.inner = Partition((("a.*", compressor("int8")),))

    def init(self, layout):
        return self.inner.init(layout)

    def reduce(self, grad, state, residual=None):
        return self.inner.reduce(grad, state, residual)


@pytest.mark.parametrize("of_names", [ByName().inner, ByName()], ids=["ours", "from elsewhere"])
def test_buckets_of_equal_shapes_are_planned_by_their_names_where_a_compressor_goes_by_names(of_names):
    layouts = [Layout((name,), ((64, 64),), torch.float32, torch.device("meta"), Ranks(2)) for name in ("a.w", "b.w")]
    alone = [dry_run(of_names, each).payload_bytes for each in layouts]
    assert alone[0] < alone[1]
    assert steady_traffic(of_names, layouts).payload_bytes == sum(alone)
