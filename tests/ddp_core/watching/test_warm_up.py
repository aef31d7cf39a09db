"""A warm-up says that nothing is compressed yet: in `watch`, `repr`, `metrics` and the log."""

import io
import logging

import pytest
from rich.console import Console
from torch import nn, ones

import gradwire
from gradwire.compress import compressor, warm_up

TEXT = "warm-up: uncompressed until step 3 (now {})"


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def trained(rank, world_size, own):
    logged, text = Kept(), io.StringIO()
    logging.getLogger("gradwire").addHandler(logged)
    model = nn.Linear(64, 64)
    spec = "powersgd:rank=1,start_iter=3"
    if own:
        ddp = gradwire.DistributedDataParallel(model, compressor=spec)
        handle = ddp.compression
    else:
        ddp = nn.parallel.DistributedDataParallel(model)
        handle = gradwire.attach(ddp, spec)
    shown = []
    handle.watch(every=1, to=Console(file=text, width=200))
    for _ in range(6):
        shown.append((repr(handle), handle.metrics()))
        ddp(ones(2, 64)).sum().backward()
    handle.close()
    logging.getLogger("gradwire").removeHandler(logged)
    return shown, text.getvalue().splitlines(), [line for line in logged.lines if "warm-up" in line]


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
def test_a_warm_up_is_shown_while_it_lasts_and_logged_once(own, ranks):
    for rank, (shown, watched, logged) in enumerate(ranks.run(trained, 2, own)):
        for step, (text, numbers) in enumerate(shown):
            assert (TEXT.format(step) in text) == (step < 3)
            assert numbers.get("warm_up_steps_left") == (3 - step if step < 3 else None)
        assert logged == (["gradwire: " + TEXT.format(0)] if rank == 0 else [])
        if rank == 0:
            assert [TEXT.format(step) in line for step, line in enumerate(watched, 1)] == [
                True,
                True,
                False,
                False,
                False,
            ]
            assert "1.0x fewer bytes" in watched[0]
            assert "1.0x fewer bytes" not in watched[-1]


def resumed(rank, world_size):
    """The lines about warm-ups after loads of a state past the warm-up, and of one inside it."""
    logged = Kept()
    handle = gradwire.attach(ddp := nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), "powersgd:start_iter=3")
    states = []
    for _ in range(5):
        ddp(ones(2, 4)).sum().backward()
        states.append(handle.state_dict())
    logging.getLogger("gradwire").addHandler(logged)
    again = gradwire.attach(ddp := nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), "powersgd:start_iter=3")
    for state in (states[4], states[0], states[1]):
        again.load_state_dict(state)
        ddp(ones(2, 4)).sum().backward()
    logging.getLogger("gradwire").removeHandler(logged)
    return [line for line in logged.lines if "warm-up" in line]


def test_a_warm_up_is_logged_once_after_a_state_past_it_too(ranks):
    assert ranks.run(resumed, 1) == [["gradwire: " + TEXT.format(1)]]


def test_a_warm_up_names_the_compressor_in_use():
    assert str(warm_up(compressor("topk:start_iter=9,warmup=bf16"), 4)) == "warm-up: bf16 until step 9 (now 4)"
    assert str(warm_up(compressor("int4:start_iter=9,warmup=int8"), 4)) == "warm-up: int8 until step 9 (now 4)"
    assert warm_up(compressor("topk:start_iter=9"), 9) is None
    assert warm_up(compressor("topk"), 0) is None
