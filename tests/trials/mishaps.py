"""What befalls a rank: it is killed, stopped, hangs or raises, at a place of a step or of the transport.

Or it does alone what all ranks should do together.
"""

import os
import signal
import subprocess
import time

from ..faulty import Fault, InjectedError, faulty


def kill(_):
    os.kill(os.getpid(), signal.SIGKILL)


def halt(mishap):
    subprocess.Popen(["sh", "-c", f"sleep {mishap.seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(mishap):
    time.sleep(mishap.seconds)


def fail(mishap):
    raise InjectedError(f"on purpose: {mishap.place}")


def swap_alone(me, state):
    me.handle.swap("topk:ratio=0.2" if me.trial.spec != "topk:ratio=0.2" else "onebit:error_feedback=1")


def load_alone(me, state):
    me.handle.load_state_dict(state)


ACTIONS = {"kill": kill, "stop": halt, "hang": hang, "raise": fail}
WITHOUT_A_STEP = ("construction", "first request", "request")


def happen(me):
    if not me.befallen:
        me.befallen = True
        ACTIONS[me.trial.mishap.kind](me.trial.mishap)


def due(me, place, step=None):
    """Whether this is where it happens."""
    mishap = me.trial.mishap
    here = mishap is not None and (mishap.rank, mishap.place) == (me.rank, place)
    return here and (place in WITHOUT_A_STEP or step == mishap.step)


def at(place, me, step=None):
    """A place that a rank passes."""
    if due(me, place, step):
        happen(me)


def passed(place, me, step):
    """The places between two steps, where all ranks save or swap if something is to happen then."""
    mishap = me.trial.mishap
    if mishap is not None and (mishap.place, mishap.step) == (place, step):
        if place == "alone":
            if mishap.rank == me.rank:
                me.befallen = True
                {"lone swap": swap_alone, "lone load": load_alone}[mishap.kind](me, me.handle.state_dict())
            return
        if place == "swap":
            me.handle.swap("topk:ratio=0.2")
        if place != "rebuild" or not me.trial.ours:  # torch's own is behind its forward, not to be reached into
            at(place, me, step)
        if place == "save":
            (me.handle.gather_state_dict if me.trial.seed % 2 else me.handle.state_dict)()


def transport(me):
    """A decorator that lets it happen at a request."""
    mishap = me.trial.mishap
    if mishap is None or mishap.place not in ("first request", "request"):
        return None
    channel, turn = (0, 0) if mishap.place == "first request" else mishap.request
    return faulty(Fault("call", mishap.rank, turn, channel, lambda: happen(me)))


def watch(me):
    """Let it happen inside forward or backward, or while our own buckets are made anew."""
    if me.trial.mishap is None:
        return
    if me.trial.ours:
        me.model._order.drain = lambda: at("rebuild", me, me.number)
    me.model.module.register_forward_pre_hook(lambda *_: at("forward", me, me.number))
    for place, layer in (("backward", me.model.module.last), ("late backward", me.model.module.first)):
        layer.weight.register_hook(lambda _, place=place: at(place, me, me.number))
