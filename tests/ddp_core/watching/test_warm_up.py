"""A warm-up says that nothing is compressed yet: in `watch`, `repr`, `metrics` and the log."""

import io

import pytest
from rich.console import Console
from torch import nn, ones
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.compress import compressor, warm_up

from ...torch_versions import fsdp_sums
from ..errors import logged
from ..wrapping import wrapped

TEXT = "warm-up: uncompressed until step 3 (now {})"


def trained(rank, world_size, own):
    shown, text = [], io.StringIO()
    with logged("warm-up") as lines:
        ddp, handle = wrapped(own, nn.Linear(64, 64), "powersgd:rank=1,start_iter=3")
        handle.watch(every=1, to=Console(file=text, width=200))
        for _ in range(6):
            shown.append((repr(handle), handle.metrics()))
            ddp(ones(2, 64)).sum().backward()
        handle.close()
    return shown, text.getvalue().splitlines(), lines


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
def test_a_warm_up_is_shown_while_it_lasts_and_logged_once(own, ranks):
    for rank, (shown, watched, lines) in enumerate(ranks.run(trained, 2, own)):
        for step, (text, numbers) in enumerate(shown):
            assert (TEXT.format(step) in text) == (step < 3)
            assert numbers.get("warm_up_steps_left") == (3 - step if step < 3 else None)
        assert lines == (["gradwire: " + TEXT.format(0)] if rank == 0 else [])
        if rank == 0:
            assert [TEXT.format(step) in line for step, line in enumerate(watched, 1)] == [True] * 2 + [False] * 3
            assert "1.0x fewer bytes" in watched[0]
            assert "1.0x fewer bytes" not in watched[-1]


def resumed(rank, world_size):
    """The lines about warm-ups after loads of a state past the warm-up, and of one inside it."""
    ddp, handle = wrapped(False, nn.Linear(4, 4), "powersgd:start_iter=3")
    states = []
    for _ in range(5):
        ddp(ones(2, 4)).sum().backward()
        states.append(handle.state_dict())
    with logged("warm-up") as lines:
        ddp, handle = wrapped(False, nn.Linear(4, 4), "powersgd:start_iter=3")
        for state in (states[4], states[0], states[1]):
            handle.load_state_dict(state)
            ddp(ones(2, 4)).sum().backward()
    return lines


def test_a_warm_up_is_logged_once_after_a_state_past_it_too(ranks):
    assert ranks.run(resumed, 1) == [["gradwire: " + TEXT.format(1)]]


def test_a_warm_up_names_the_compressor_in_use():
    assert str(warm_up(compressor("topk:start_iter=9,warmup=bf16"), 4)) == "warm-up: bf16 until step 9 (now 4)"
    assert str(warm_up(compressor("int4:start_iter=9,warmup=int8"), 4)) == "warm-up: int8 until step 9 (now 4)"
    assert warm_up(compressor("topk:start_iter=9"), 9) is None
    assert warm_up(compressor("topk"), 0) is None


def ratios(rank, world_size, kind):
    """What reports of every step say of the ratio, with a warm-up of three steps, three of int8 and three of none."""
    found, model = [], nn.Linear(64, 64, bias=False)
    if kind == "shards":
        handle = gradwire.attach(
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,))), gather="bf16", reduce="bf16"
        )
    else:
        model, handle = wrapped(kind == "own", model, "int8:start_iter=3")
    handle.watch(every=1, to=lambda numbers, step: found.append(numbers["ratio"]))
    for step in range(10):
        if step == 3 and kind == "shards":
            handle.swap(gather="int8", reduce="int8")
        if step == 6:
            handle.swap(**({"gather": "none", "reduce": "none"} if kind == "shards" else {"spec": "none"}))
        model(ones(2, 64)).sum().backward()
    handle.close()
    return found


@pytest.mark.parametrize("kind", ["torch", "own", pytest.param("shards", marks=fsdp_sums)])
def test_a_report_after_a_warm_up_or_a_swap_is_of_one_compressor_alone(kind, ranks):
    found, _ = ranks.run(ratios, 2, kind)  # the first rank reports
    first, compressed, last = found[:3], found[3:6], found[6:]
    for each in (first, compressed, last):
        assert len(each) == 3
        assert each == pytest.approx(each[:1] * 3)
    assert compressed[0] > 1.9 * first[0]
    assert last[0] < 0.6 * compressed[0]
