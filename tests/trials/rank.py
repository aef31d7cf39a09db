"""One rank of a trial: it trains as drawn, and notes what the laws need."""

import math
import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ..ddp_core.nets import Batch
from ..ranks import GROUP_TIMEOUT
from . import draw, events, mishaps
from .gradients import dense, difference, held_back
from .models import SPARSE, Headed, loss_of

RATE, NORM = 0.05, 0.5
SWITCH = "GRADWIRE_SHARED_MEMORY"


@dataclass
class Noted:
    """A step on one rank: {parameter: gradient or None} before it, what it gives, and what it got.

    `used`: parameters that its backwards reached. `held`: what is held back after it. `differing`: copies of the model that
    got something else.
    """

    before: dict
    given: dict
    used: set
    got: dict
    held: dict | None = None
    buckets: list = field(default_factory=list)
    differing: list = field(default_factory=list)
    finite: bool = True


@dataclass
class Answer:
    """All of a rank's steps, its parameters at the end, and what it then holds back."""

    steps: list
    parameters: dict
    held: dict


class Rank:
    """A model of a trial on this rank, its twin without DDP, and copies that have to go on alike."""

    def __init__(self, trial, rank):
        self.trial, self.rank = trial, rank
        limit = timedelta(seconds=draw.LIMIT) if trial.mishap else GROUP_TIMEOUT - timedelta(seconds=5)
        self.groups = [dist.new_group(backend="gloo", timeout=limit) for _ in range(trial.groups)]
        self.limit, self.spec = limit, trial.spec
        self.readers, self.errors = [], []  # threads that read statistics, and what they raised
        self.befallen, self.number = False, 0
        mishaps.at("construction", self)
        self.model, self.handle = self.made(mishaps.transport(self))
        self.twin = self.net()
        self.copies = {}  # {how it was made: (model, handle)}
        self.reference = TorchDDP(self.net(), **torch_options(trial)) if beside_torch(trial) else None
        mishaps.watch(self)

    def net(self):
        return Headed(self.trial.parts, self.trial.seed)

    def made(self, transport=None, network=None):
        """A model and its handle, as new, but for the network if it is given."""
        network = network or self.net()
        options = dict(self.trial.options)
        if self.groups:
            options["process_group"] = self.groups if len(self.groups) > 1 else self.groups[0]
        more = {"timeout": self.limit, "transport": transport, "undo": True}  # what is thrown away leaves no trace
        if self.trial.ours:
            model = gradwire.DistributedDataParallel(network, compressor=self.spec, **more, **options)
            return model, model.compression
        model = TorchDDP(network, **options)
        return model, gradwire.attach(model, self.spec, **more)

    @property
    def models(self):
        return [self.model, *(model for model, _ in self.copies.values())]

    @property
    def handles(self):
        return [self.handle, *(handle for _, handle in self.copies.values())]

    def step(self, number):
        """One synchronized step of all models."""
        plan, self.number = self.trial.steps[number], number
        for name, argument in plan.events:
            events.EVENTS[name](self, argument)
        for place in ("save", "swap", "rebuild", "alone"):
            mishaps.passed(place, self, number)
        for model in (*self.models, *filter(None, [self.reference])):
            zero(model, plan.zero)
        noted = self.given(number, plan)
        time.sleep(plan.pauses[self.rank])
        for model in self.models:
            self.backwards(model, number, plan)
        noted.got = dense(self.model.module)
        copies = {how: difference(noted.got, dense(model.module)) for how, (model, _) in self.copies.items()}
        noted.differing = [f"{how}: {differing}" for how, differing in copies.items() if differing]
        if self.reference is not None:
            self.compare(noted, number, plan)
        noted.buckets = [bucket.parameters for bucket in self.handle.stats().buckets]
        noted.finite = all(grad is None or bool(grad.isfinite().all()) for grad in noted.got.values())
        for model in (*self.models, *filter(None, [self.reference])):
            descend(model, plan, noted.finite)
        return noted

    def compare(self, noted, number, plan):
        """Train torch's, from the same parameters, and note where it gets something else."""
        self.backwards(self.reference, number, plan)
        theirs = dense(self.reference.module)
        if differing := difference(noted.got, theirs, tolerance=1e-2):
            noted.differing.append(f"torch: {differing}")

    def backwards(self, model, number, plan):
        """All micro-batches of a step; the last one is synchronized."""
        for micro_batch in range(plan.micro_batches):
            last = micro_batch == plan.micro_batches - 1
            with nullcontext() if last else model.no_sync():
                loss = loss_of(model(Batch.drawn(self.rank, number, micro_batch)), plan.both[self.rank])
                (loss * self.factor(plan, last)).backward()

    def factor(self, plan, last):
        """Of a loss; infinite where this rank's gradients are to overflow."""
        return math.inf if last and plan.overflow == self.rank else 1.0

    def given(self, number, plan):
        """What this rank's backwards bring, by the twin, added to what was there before."""
        copy_parameters(self.model.module, self.twin)
        if self.reference is not None:
            copy_parameters(self.model.module, self.reference.module)
        before, used = dense(self.model.module), set()
        total = {name: None if grad is None else grad.clone() for name, grad in before.items()}
        for micro_batch in range(plan.micro_batches):
            self.twin.zero_grad()
            loss = loss_of(self.twin(Batch.drawn(self.rank, number, micro_batch)), plan.both[self.rank])
            (loss * self.factor(plan, micro_batch == plan.micro_batches - 1)).backward()
            for name, grad in dense(self.twin).items():
                if grad is not None:
                    used.add(name)
                    total[name] = grad if total[name] is None else total[name] + grad
        return Noted(before, total, used, {})

    def close(self):
        for reader in self.readers:
            reader.join()
        for handle in self.handles:
            handle.close()
        if self.errors:
            raise self.errors[0]


@contextmanager
def environment(trial):
    """Whether ranks may share memory, while a trial lasts: processes serve other tests as well."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = str(int(trial.shared_memory))
    try:
        yield
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


def train(rank, world_size, trial):
    with environment(trial):
        return trained(rank, trial)


def trained(rank, trial):
    """As `train`, in the trial's environment."""
    me = Rank(trial, rank)
    notes = []
    if trial.inputs:
        with me.model.join(divide_by_initial_world_size=trial.weighted):
            notes = [me.step(number) for number in range(trial.inputs[rank])]
    else:
        for number in range(len(trial.steps)):
            notes.append(me.step(number))
            if any(name == "look" for name, _ in trial.steps[number].events):
                notes[-1].held = held_back(me.handle.state_dict())
    held = held_back(me.handle.state_dict())
    answer = Answer(notes, {name: p.detach().clone() for name, p in me.model.module.named_parameters()}, held)
    me.close()
    return answer


def beside_torch(trial):
    """Whether torch's own has to give the same; it errs with sparse gradients, and skipping beside no_sync."""
    exact = trial.ours and trial.spec == "none" and not trial.mishap and not trial.inputs
    swaps = any(name == "swap" for step in trial.steps for name, _ in step.events)
    return exact and not swaps and not SPARSE & set(trial.parts) and trial.seed % 2 == 0


def torch_options(trial):
    """The options of a trial that torch has, too."""
    return {name: value for name, value in trial.options.items() if name != "skip_all_reduce_unused_params"}


def zero(model, how):
    if how != "keep":
        model.zero_grad(set_to_none=how == "none")


def descend(model, plan, finite):
    """A step of gradient descent, or none where gradients have overflowed; then they are dropped."""
    if not finite:
        model.zero_grad(set_to_none=True)
        return
    with torch.no_grad():
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
        total = float(torch.stack([norm.double() for norm in norms]).norm()) if norms else 0.0
        scale = min(1.0, NORM / total) if plan.clip and total else 1.0
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-RATE * scale)


def copy_parameters(source, target):
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs)
