"""Trials of saves on another thread, beside training: they change no bit, and what is saved is of a whole step."""

from dataclasses import dataclass
from datetime import timedelta
from random import Random

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.hooks.fsdp import ShardHandle

from ..hooks.fsdp.given import given_model, mean_gradients
from ..hooks.fsdp.given import gradients as of_parts
from ..hooks.given import Given, average, gradients, same
from ..hooks.local_sgd.sites import Net, descend
from ..hooks.saving import Busy, Saves
from . import draw
from .accounts import SHAPES
from .shards import AMONG_REPLICAS, SUMS, forget_meshes

LATEST = 3  # the step in which new buckets may still be met; until then the fields of a state move


@dataclass(frozen=True)
class Trial:
    """`handle`: own, attached, fsdp or local. `often`: saves follow each other in a loop, else they are beside requests."""

    seed: int
    world_size: int
    handle: str
    often: bool
    steps: int
    arguments: dict[str, object]


def drawn(seed):
    source = Random(f"saves {seed}")
    handle = source.choice(("own", "attached", "fsdp", "fsdp", "local"))
    world_size = source.choice((2, 2, 3))
    if handle == "fsdp":
        arguments = {"gather": source.choice(("none", "int8")), "reduce": source.choice(SUMS)}
        if source.random() < 0.5:
            arguments["replicas"], world_size = source.choice(AMONG_REPLICAS), 2
        arguments["undo"] = Random(f"saves {seed} undo").random() < 0.5
    elif handle == "local":
        every = source.randint(1, 4)
        arguments = {"every": every, "fragments": source.randint(1, min(every, 3)), "overlap": source.random() < 0.7}
        arguments["compressor"] = source.choice(("none", "int4", "topk:ratio=0.3", "powersgd:rank=1"))
    else:
        rule = source.choice(({}, {"static_graph": True}, {"find_unused_parameters": True}))
        arguments = {"spec": source.choice(draw.SPECS), "bucket_cap_mb": source.choice((0.0005, 0.002, 25)), **rule}
    often = handle == "local" or source.random() < 0.5
    return Trial(seed, world_size, handle, often, source.randint(LATEST + 2, 12), arguments)


class Training:
    """The model of a trial and what saves it."""

    def __init__(self, trial, rank):
        arguments = dict(trial.arguments)
        self.rank, self.saves = rank, Saves(waits=bool(arguments.get("undo")))  # else it waits for the step's end
        transport = None if trial.often else self.saves
        if trial.handle == "fsdp":
            shape = (2, 1) if "replicas" in arguments else (trial.world_size,)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            self.model = given_model(mesh=mesh)
            self.handle = gradwire.attach(self.model, transport=transport, **arguments)
        elif trial.handle == "local":
            self.model = Net(0)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            limit = timedelta(seconds=40)
            self.handle = gradwire.LocalSteps(self.model, self.optimizer, timeout=limit, **arguments)
        elif trial.handle == "own":
            spec = arguments.pop("spec")
            self.model = gradwire.DistributedDataParallel(
                Given(SHAPES), compressor=spec, transport=transport, **arguments
            )
            self.handle = self.model.compression
        else:
            spec = arguments.pop("spec")
            self.model = TorchDDP(Given(SHAPES), **arguments)
            self.handle = gradwire.attach(self.model, spec, transport=transport)

    def step(self, number):
        """What a step gives."""
        if isinstance(self.handle, gradwire.LocalSteps):
            descend(self.model, self.optimizer, self.rank, number)
            return [parameter.detach().clone() for parameter in self.model.parameters()]
        if isinstance(self.handle, ShardHandle):
            return mean_gradients(self.model, of_parts(self.rank, number))
        return average(self.model, gradients(self.rank, number, SHAPES))

    def close(self):
        if isinstance(self.handle, gradwire.LocalSteps):
            self.handle.finish()
        else:
            self.handle.close()


def steps_of(state):
    """After how many steps a state was saved."""
    if "steps" in state:
        return state["steps"]
    return state["step"] if "step" in state else next(iter(state.values()))["step"]


def train(rank, world_size, trial):
    """Where saves have changed something, or were of no whole step; in words."""
    forget_meshes()
    quiet, states, expected = Training(trial, rank), {}, []
    for step in range(trial.steps):
        expected.append(quiet.step(step))
        states[step + 1] = quiet.handle.state_dict()
    quiet.close()
    busy = Training(trial, rank)
    thread = Busy(busy.handle.state_dict)
    if trial.often:
        thread.start()
    else:
        busy.saves.save = busy.handle.state_dict
    found = []
    for step in range(trial.steps):
        found.append(busy.step(step))
        if trial.often and step % 3 == rank:
            thread.once_more()
    busy.saves.join()
    saved = thread.stop() if trial.often else busy.saves.results
    busy.close()
    errors = [thread.error] if thread.error else busy.saves.errors
    wrong = [f"a save raised {errors[0]!r}"] if errors else []
    wrong += [] if saved else ["nothing was saved beside training"]
    wrong += [] if same(found, expected) else ["training went another way"]
    parts = {steps_of(state) for state in saved if steps_of(state) > LATEST and not same(*whole(state, states))}
    return ", ".join([*wrong, *(f"what was saved of step {number} is not what it left" for number in sorted(parts))])


def whole(state, states):
    """A state and that which the step left; two trainings have identities of their own."""
    return tuple(
        {key: each for key, each in one.items() if key != "training"} for one in (state, states[steps_of(state)])
    )
