"""What happens between two steps, on all ranks alike."""

import copy
import gc
import io
import os
import pickle
import threading
import time

import torch

from ..ddp_core.nets import Batch
from .models import loss_of

READS, NAP = 30, 0.001


def swap(me, spec):
    for handle in me.handles:
        handle.swap(spec)
    me.spec = spec


def rescale(me, factor):
    for handle in me.handles:
        handle.rescale(factor)


def resume(me, _):
    """A new model that takes the states of this one, through a file; it has to go on alike."""
    saved = through_file({"model": me.model.state_dict(), "compression": me.handle.state_dict()})
    fresh, handle = me.made()
    fresh.load_state_dict(saved["model"])
    handle.load_state_dict(saved["compression"])
    keep(me, "resumed", fresh, handle)


def duplicate(me, _):
    """A copy, which goes on alike."""
    model = copy.deepcopy(me.model)
    keep(me, "copied", model, model.compression)


def unpickled(me, _):
    model = pickle.loads(pickle.dumps(me.model))
    keep(me, "pickled", model, model.compression)


def keep(me, how, model, handle):
    """Train a copy beside the model, in the place of one that was made the same way; with the gradients that there are."""
    if how in me.copies:
        me.copies[how][1].close()
    for mine, theirs in zip(model.module.parameters(), me.model.module.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    me.copies[how] = model, handle


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def rewrapped(me, _):
    """A new wrapper around the same network, which goes on from the state of the one before."""
    saved, network = me.handle.state_dict(), me.model.module
    me.handle.close()
    me.model = me.handle = None
    gc.collect()
    me.model, me.handle = me.made(network=network)
    me.handle.load_state_dict(saved)


def evaluate(me, _):
    """A forward that no backward follows, without gradients."""
    with torch.no_grad():
        for model in me.models:
            model(Batch.drawn(me.rank, -1, 0))


def discard(me, _):
    for model in me.models:
        model(Batch.drawn(me.rank, -1, 0))


def throw(me, _):
    """A synchronized backward whose gradients are thrown away."""
    for model, handle in zip(me.models, me.handles, strict=True):
        parameters = list(model.module.parameters())
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        model.zero_grad()
        loss_of(model(Batch.drawn(me.rank, -2, 0)), True).backward()
        handle.discard_step()
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def fork(me, _):
    """A forked process whose backward is refused, by torch where backward had threads."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        told = "nothing"
        try:
            loss_of(me.model(Batch.drawn(me.rank, -3, 0)), True).backward()
        except BaseException as error:
            told = str(error)
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert "was forked" in told or "fork-based multiprocessing" in told, told


def damaged(me, _):
    state = me.handle.state_dict()
    for fields in state["parameters"].values():
        for name, numbers in fields.items():
            if numbers.is_floating_point() and numbers.numel():
                fields[name] = torch.full_like(numbers, torch.nan)
    state = {**state, "step": -1} if not state["parameters"] else state
    try:
        me.handle.load_state_dict(state)
    except ValueError:
        return
    raise AssertionError("a damaged state was taken")


def look(me, _):
    """The state is read after the step."""


def read(me, _):
    """Read statistics while the next step runs."""

    model, handle = me.model, me.handle

    def often():
        for _ in range(READS):
            stats = handle.stats()
            assert stats.last.traffic.payload_bytes <= stats.total.traffic.payload_bytes
            if me.trial.ours:
                model.last_step()
            time.sleep(NAP)

    me.readers.append(threading.Thread(target=guarded, args=(often, me.errors)))
    me.readers[-1].start()


def guarded(function, errors):
    try:
        function()
    except Exception as error:
        errors.append(error)


EVENTS = {
    "swap": swap,
    "rescale": rescale,
    "resume": resume,
    "deepcopy": duplicate,
    "pickle": unpickled,
    "rewrap": rewrapped,
    "evaluate": evaluate,
    "discard": discard,
    "look": look,
    "throw": throw,
    "fork": fork,
    "damaged": damaged,
    "read": read,
}
