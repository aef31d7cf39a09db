"""Tensor parallelism beside data parallelism, under every wrapper: a part belongs to those that have it."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ..replicate.given import local, replicate
from .wrappers import WHOLE, of_rank, over, whole

STEPS = 4
PARTS = ("up.weight", "up.bias", "down.weight")  # each rank has a part of these, and the rest whole
TOLERANCES = {"none": 1e-6, "int8:error_feedback=1": 2e-3, "powersgd:rank=1": 0.05}


class Block(nn.Module):
    """As of a Llama: a norm, and two matrices of which each rank has a part."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(7), nn.Linear(7, 36)
        self.scale = nn.Parameter(torch.ones(7))
        self.down = nn.Linear(36, 7, bias=False)

    def forward(self, batch):
        return batch + self.down(self.up(self.norm(batch) * local(self.scale)).relu())


def network(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        block.scale = nn.Parameter(distribute_tensor(block.scale.detach(), mesh, [Replicate()]))
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def in_ddp(model, mesh, spec):
    ddp = TorchDDP(model, device_mesh=mesh)
    return ddp, spec and gradwire.attach(ddp, spec)


def in_own_ddp(model, mesh, spec):
    ddp = gradwire.DistributedDataParallel(model, compressor=spec or "none", device_mesh=mesh)
    return ddp, ddp.compression


def by_parts(wrap, **to_nobody):
    def wrapped(model, mesh, spec):
        for part in (*model, model):
            wrap(part, mesh=mesh)
        return model, spec and gradwire.attach(model, **{**to_nobody, "reduce" if to_nobody else "compressor": spec})

    return wrapped


WRAPS = {
    "attach": in_ddp,
    "own": in_own_ddp,
    "replicate": by_parts(replicate),
    "FSDP2": by_parts(fully_shard, gather="none"),
}


class Training:
    """Steps of SGD, whose parameters torch's DDP shows by name before its first forward alone."""

    def __init__(self, wrapper, spec, axes=("dp", "tp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
        model, self.place = network(mesh["tp"]), mesh.get_local_rank("dp")
        self.model, self.handle = WRAPS[wrapper](model, mesh["dp"], spec)
        self.parameters = dict(model.named_parameters())
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.1)

    def train(self, first, last):
        """The parameters after some steps: all of them where they are cut for the wrapper's sake."""
        for step in range(first, last):
            batch = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * self.place + step))
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {name: whole(each.detach()).clone() for name, each in self.parameters.items()}


def saved(wrapper, training):
    return {"compression": gradwire.GatheredState(training.handle) if wrapper in WHOLE else training.handle}


def resumed(rank, world_size, wrapper, axes, folder):
    """By torch's averages, by ours, and by ours after a checkpoint of all ranks; the shape of a residual."""
    theirs, found = Training("attach" if wrapper == "own" else wrapper, None, axes).train(0, STEPS), {}
    for spec in TOLERANCES if wrapper in WHOLE else list(TOLERANCES)[:2]:
        training, again = Training(wrapper, spec, axes), Training(wrapper, spec, axes)
        training.train(0, STEPS // 2)
        dcp.save(saved(wrapper, training), checkpoint_id=f"{folder}/{spec}")
        with torch.no_grad():
            for name, each in again.parameters.items():
                local(each).copy_(local(training.parameters[name]))
        shape = spec != "none" and of_rank(training.handle.state_dict())["parameters"]["0.up.weight"]["residual"].shape
        ours = training.train(STEPS // 2, STEPS)
        dcp.load(saved(wrapper, again), checkpoint_id=f"{folder}/{spec}")
        found[spec] = ours, again.train(STEPS // 2, STEPS), shape
        training.handle.close()
        again.handle.close()
    return theirs, found


@over(*WRAPS, slow=["own", "replicate"])
def test_each_part_is_averaged_what_is_whole_stays_alike_and_a_checkpoint_resumes_to_the_bit(ranks, wrapper, tmp_path):
    axes = ("tp", "dp") if wrapper in ("own", "FSDP2") else ("dp", "tp")
    answers = ranks.run(resumed, 4, wrapper, axes, str(tmp_path))
    step = 2 if axes[0] == "dp" else 1  # between ranks that have one part
    for rank, (theirs, found) in enumerate(answers):
        for spec, (ours, again, shape) in found.items():
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCES[spec], atol=TOLERANCES[spec])
            torch.testing.assert_close(again, ours, rtol=0, atol=0)
            torch.testing.assert_close(ours, answers[rank ^ step][1][spec][0], rtol=0, atol=0)
            assert all(
                torch.equal(numbers, answers[0][1][spec][0][name])
                for name, numbers in ours.items()
                if not name.endswith(PARTS)
            )
            assert wrapper not in WHOLE or spec == "none" or shape == (18, 7)


def of_another_part(rank, world_size, wrapper):
    """The keys of a state, and what a load of the other part's state raises; one's own comes back."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    _, handle = WRAPS[wrapper](network(mesh["tp"]), mesh["dp"], "int4")
    states = [None, None]
    torch.distributed.all_gather_object(states, handle.state_dict())
    handle.load_state_dict(states[rank])
    with pytest.raises(ValueError, match="load each rank's own") as raised:
        handle.load_state_dict(states[1 - rank])
    if wrapper not in WHOLE:
        return list(states[rank]), str(raised.value)
    handle.load_state_dict(states, resize=True)
    assert f"of part {1 - rank} of 2, this rank is in part {rank} of 2" in str(raised.value)
    return list(handle.gather_state_dict()), str(raised.value)


@over(*WRAPS)
def test_a_state_comes_back_to_the_part_that_it_is_of_alone(ranks, wrapper):
    answers = ranks.run(of_another_part, 2, wrapper)
    assert len({key for keys, _ in answers for key in keys if key != "gradwire"}) == 2


def cut_later(model, mesh, wrap):
    """torch's DDP refuses parameters that are cut before the wrap, and lets those train that are cut after it."""
    ddp = TorchDDP(nn.Sequential(Block(), Block()))
    for block in ddp.module:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wrap(ddp)


WITHOUT_THE_AXIS = {
    "attach": lambda model, mesh: cut_later(model, mesh, lambda ddp: gradwire.attach(ddp, "int8")),
    "comm_hooks": lambda model, mesh: cut_later(
        model, mesh, lambda ddp: ddp.register_comm_hook(None, gradwire.comm_hooks.int8)
    ),
    "own": lambda model, mesh: gradwire.DistributedDataParallel(model, compressor="int8"),
}


def refused(rank, world_size, how):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["tp"]
    with pytest.raises(TypeError) as raised:
        WITHOUT_THE_AXIS[how](network(mesh), mesh)
    return str(raised.value)


@pytest.mark.parametrize("how", WITHOUT_THE_AXIS)
def test_parameters_in_parts_are_refused_without_the_axis_of_the_mesh(ranks, how):
    for text in ranks.run(refused, 2, how):
        assert "parameters (0." in text
        assert ", ...) are DTensors" in text
        assert "device_mesh=mesh['dp']" in text
