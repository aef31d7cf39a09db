"""Ranks that are late, set up otherwise, killed, or end by themselves: the others end too, and in time."""

import os
import signal
import time

import torch

from .checks import check
from .trainings import check_alike, run, train, wrapped
from .world import UNNOTICED

LATE = 4  # seconds


@check()
def late_rank(world):
    """A rank that is late at the first step, and one in the middle of a training, change no bit."""

    def before(step):
        if (step == 0 and world.rank == world.size - 1) or (step == 7 and world.rank == 0):
            time.sleep(LATE)

    for kind, spec in (("own", "int4"), ("attach", "powersgd:rank=2")):
        (_, late), (_, control) = run(world, kind, spec, before=before), run(world, kind, spec)
        check_alike(world, late, spec)
        world.told[f"{kind} {spec}"] = torch.equal(late, control)
        assert torch.equal(late, control) or spec.startswith("powersgd")


@check()
def other_compressor_on_a_rank(world):
    """Every rank raises an error."""
    try:
        ddp, _ = wrapped(world, "attach", "int8" if world.rank else "int4")
        train(world, ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), world.device, range(2))
    except (ValueError, RuntimeError) as error:
        world.told["raised"] = f"{type(error).__name__}: {error}"[:200]
        return
    raise AssertionError("no rank objects")


def end_in_step(world, end):
    """Train until the last rank ends itself, and then end this one as a script does that catches nothing."""

    def before(step):
        if step == 5 and world.rank == world.size - 1:
            end()

    began = time.perf_counter()
    try:
        run(world, "own", "int4", before=before)
        world.wait()
    except RuntimeError as error:
        print(f"raised after {time.perf_counter() - began:.1f} s: {error}", flush=True)
        os._exit(1)
    os._exit(UNNOTICED)


@check(ends=True)
def killed_rank(world):
    """The kernel ends the last rank."""
    end_in_step(world, lambda: os.kill(os.getpid(), signal.SIGKILL))


@check(ends=True)
def raising_rank(world):
    """The last rank ends with an exit code."""
    end_in_step(world, lambda: os._exit(3))
