"""What is zero on all ranks stays exactly zero: whole parameters, and rows along the first dimension."""

import pytest
import torch

from gradwire.compress import Layout, Simulation, compressor
from gradwire.compress.algorithms.zero_rows import ZeroRows
from gradwire.compress.state import tree as states
from gradwire.compress.state.leaf import BLOCK

from ..given import placed
from ..test_laws import KINDS, OBJECTS, OWN_LAW, SPECS, build, layout

SHAPES = ((12, 20), (40,), (24, 3, 3), (3,), (2, 33), (5, 1), (40, 9), (17,))
UNUSED = {"p0": (0, 1, 7, 11), "p2": (0, 5, 23), "p4": (0,), "p5": (2,)}  # rows
NEVER = ("p1", "p3", "p6")  # whole parameters
MORE = (
    "onebit",
    "onebit:rotate=false,error_feedback=false",
    "int2:error_feedback=false",
    "int2",
    "int4:rotate=true,error_feedback=false",
    "acp-powersgd:error_feedback=false,min_compression_rate=0",
    "batched-powersgd:rank=1,error_feedback=false",
    "powersgd:rank=4,payload=int4,min_compression_rate=0,power_iterations=2",
    "powersgd:payload=int4,error_feedback=false",
    "powersgd:min_compression_rate=0,error_feedback=false",
    "adaptive:ladder=int4/onebit,target=0.99",
    "onebit:error_feedback=0.9",
    "onebit:residual_bits=8",
    "int2:residual_bits=16",
)
EVERY = list(dict.fromkeys([*SPECS, *OWN_LAW, *MORE]))


def zeroed(within, flat):
    views = within.views(flat)
    for name, rows in UNUSED.items():
        views[name][list(rows)] = 0
    for name in NEVER:
        views[name].zero_()
    return flat


def assert_zero(within, flat, what):
    kept = flat.clone()
    assert torch.equal(zeroed(within, kept), flat), (
        f"{what}: {(kept != flat).sum()} elements of unused rows are not zero"
    )


def assert_keeps_zeros(built, within, steps=3):
    simulation, generator = Simulation(built, within), torch.Generator().manual_seed(1)
    for step in range(steps):
        given = [
            zeroed(within, torch.randn(within.numel, generator=generator)).to(within.dtype)
            for _ in range(within.ranks.world_size)
        ]
        outputs = simulation.step(given)
        assert outputs[0].any() or "randomk" in str(built).lower() or step == 0
        assert_zero(within, outputs[0], f"the average of step {step}")
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        for state in simulation.states:
            for name, numbers in states.held_back(state).items():
                flat = torch.zeros(within.numel, dtype=numbers.dtype)
                within.views(flat)[name].view(-1).copy_(numbers)
                assert_zero(within, flat, f"what is held back of {name} after step {step}")


@pytest.mark.each_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [*EVERY, *OBJECTS])
def test_what_is_zero_on_all_ranks_stays_zero(compiled_backend, spec, dtype):
    for world_size in (1, 3) if dtype == torch.bfloat16 else (2,):
        assert_keeps_zeros(build(spec), layout(SHAPES, dtype, world_size))


@pytest.mark.parametrize("spec", [spec for spec in [*KINDS, *OWN_LAW] if spec != "hosts"])
def test_what_is_zero_on_all_hosts_stays_zero(spec):
    within = placed(layout(SHAPES, torch.float32, 4), per_host=2)
    assert_keeps_zeros(compressor(f"hosts+{spec}"), within, steps=2)


@pytest.mark.parametrize("spec", ["onebit:error_feedback=1", "batched-powersgd:rank=1", "acp-powersgd:rank=1"])
def test_a_row_that_one_rank_uses_is_sent(spec):
    within = layout(SHAPES, torch.float32, 3)
    simulation = Simulation(compressor(spec), within)
    total, step = torch.zeros(within.numel), torch.zeros(within.numel)
    within.views(step)["p0"][7] = 1.0
    for _ in range(200):
        total += simulation.step([step, torch.zeros_like(step), torch.zeros_like(step)])[0]
    torch.testing.assert_close(total / 200, step / 3, rtol=0, atol=0.05)


@pytest.mark.parametrize("bits", [32, 8])
def test_what_a_server_holds_back_of_a_row_that_no_rank_uses_comes_with_the_next_average(bits):
    within = layout(((2, 1),), torch.float32, 2)  # rows of one block
    simulation = Simulation(compressor(f"onebit:block=8,rotate=false,error_feedback=1,residual_bits={bits}"), within)
    step = [torch.tensor([1.0, 1.0]), torch.tensor([0.25, -0.25])]  # all of one size: workers hold back nothing
    assert torch.equal(simulation.step(step)[0], torch.tensor([0.5, 0.5]))
    assert torch.equal(simulation.step([torch.zeros(2), torch.zeros(2)])[0], torch.tensor([0.125, -0.125]))


def test_parts_of_rows_are_told_by_the_rows_of_whole_parameters():
    cpu = torch.device("cpu")
    within = Layout(("a", "b"), ((7,), (5,)), torch.float32, cpu, starts=(2, 0), row_sizes=(4, 0))
    rows = ZeroRows.of_layout(within)
    flat = torch.tensor([0.0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 1])
    used = rows.used(flat, None, ranks=3)
    assert used[: rows.count].tolist() == [False, True, False, True]
    assert torch.equal(rows.unpacked(rows.packed(used, 3)), used)
    marked = torch.ones(7)
    rows.clear(used, marked, (1, 8))  # of elements 1 to 7
    assert marked.tolist() == [0, 1, 1, 1, 1, 0, 1]
    codes = torch.ones(2 * BLOCK, dtype=torch.int8)  # of the same elements
    rows.clear(used, codes, (1, 8))
    assert codes[:6].tolist() == [0, 1, 1, 1, 1, 0]
    assert codes[6:].all()
    rows.clear(torch.zeros_like(used), codes, (1, 8))
    assert (codes == 0).nonzero().view(-1).tolist() == [*range(6), BLOCK]


SELECT = ("adacomp", "bf16+chunktopk", "chunktopk", "dgc", "dropping", "randomk", "topk")
ROUND = ("bf16", "fp16", "int4", "int8", "natural", "qsgd", "ternary", "terngrad")
MIX = ("rotate=true", "core", "powersgd", "hosts")
BY_ELEMENT = [spec for spec in EVERY if spec.startswith(SELECT + ROUND) and not any(each in spec for each in MIX)]


@pytest.mark.parametrize("spec", BY_ELEMENT)
def test_single_elements_that_are_zero_on_all_ranks_stay_zero_where_nothing_mixes_elements(spec):
    within, generator = layout(SHAPES, torch.float32, 3), torch.Generator().manual_seed(1)
    simulation, unused = Simulation(build(spec), within), torch.rand(within.numel, generator=generator) < 0.3
    for _ in range(3):
        given = [torch.randn(within.numel, generator=generator).masked_fill(unused, 0) for _ in range(3)]
        for output in simulation.step(given):
            assert not output[unused].any()
