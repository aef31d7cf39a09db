"""Tensor parallelism under torch's DDP: averages of each part with the data-parallel axis of the mesh, else a refusal."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ..torch_versions import replicate_of_fsdp

PLAN = {"1": ColwiseParallel(), "3": RowwiseParallel()}
STEPS = 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def refused(rank, world_size, hook):
    """What is said of parameters that are cut after the wrap, which torch lets train; cut before it, torch refuses them."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = TorchDDP(network())
    parallelize_module(model.module, mesh["tp"], PLAN)
    with pytest.raises(TypeError) as raised:
        model.register_comm_hook(None, gradwire.comm_hooks.int8) if hook else gradwire.attach(model, "int8")
    return str(raised.value)


@pytest.mark.parametrize("hook", [False, True], ids=["attach", "comm_hooks"])
def test_parameters_in_parts_are_refused_with_what_to_do(ranks, hook):
    for text in ranks.run(refused, 2, hook):
        assert "4 parameters (1.weight, 1.bias, 3.weight, ...) are DTensors" in text
        assert "device_mesh=mesh['dp']" in text


class Training:
    """Steps of SGD of a tensor-parallel model, whose parameters torch's DDP shows by name before its first forward alone."""

    def __init__(self, spec):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(network(), mesh["tp"], PLAN)
        self.place, self.model = mesh.get_coordinate()[0], TorchDDP(model, device_mesh=mesh["dp"])
        self.parameters = dict(self.model.module.named_parameters())
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.1)
        self.handle = None if spec is None else gradwire.attach(self.model, spec)

    def train(self, first, last):
        """The parameters of this rank after some steps."""
        for step in range(first, last):
            batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * self.place + step))
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {name: each.detach().clone() for name, each in self.parameters.items()}


def both(rank, world_size, spec):
    """Parameters by torch's averages, by ours, and by ours after a resume; the shapes of residuals."""
    theirs = Training(None).train(0, STEPS)
    ours = Training(spec)
    halfway = ours.train(0, STEPS // 2)
    state = ours.handle.state_dict()
    through = ours.train(STEPS // 2, STEPS)
    resumed = Training(spec)
    for name, each in resumed.parameters.items():
        each.data.copy_(halfway[name])
    resumed.handle.load_state_dict(state)
    again = resumed.train(STEPS // 2, STEPS)
    for each in (ours, resumed):
        each.handle.close()
    return theirs, through, again, {name: fields["residual"].shape for name, fields in state["parameters"].items()}


@pytest.mark.parametrize("spec", ["none", "int8:error_feedback=1"])
def test_each_part_is_averaged_over_the_data_parallel_ranks_and_resumes_to_the_bit(ranks, spec):
    answers = ranks.run(both, 4, spec)
    for theirs, ours, resumed, residuals in answers:
        tolerance = 0 if spec == "none" else 2e-3
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(resumed, ours, rtol=0, atol=0)
        assert spec == "none" or residuals["1.weight"] == (4, 6)
    for one, other in zip(answers[:2], answers[2:], strict=True):
        torch.testing.assert_close(one[1], other[1], rtol=0, atol=0)  # of data parallelism


def of_another_part(rank, world_size, wrap, folder):
    """What a load of the other part's state raises; whether one's own comes back, also from a checkpoint of both parts."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    handle = wrap(parallelize_module(network(), mesh["tp"], PLAN), mesh["dp"])
    states = [None, None]
    torch.distributed.all_gather_object(states, handle.state_dict())
    handle.load_state_dict(states[rank])
    handle.load_state_dict(states, resize=True)
    with pytest.raises(ValueError, match=f"of part {1 - rank} of 2, this rank is in part {rank} of 2") as raised:
        handle.load_state_dict(states[1 - rank])
    gathered = handle.gather_state_dict()
    dcp.save({"compression": gathered}, checkpoint_id=folder)
    back = {"compression": handle.gather_state_dict()}
    dcp.load(back, checkpoint_id=folder)
    handle.scatter_state_dict(back["compression"])
    handle.close()
    return list(gathered), str(raised.value)


def in_torchs_ddp(model, mesh):
    return gradwire.attach(TorchDDP(model, device_mesh=mesh), "int4")


def in_own_ddp(model, mesh):
    return gradwire.DistributedDataParallel(model, compressor="int4", device_mesh=mesh).compression


def in_replicate(model, mesh):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return gradwire.attach(replicate(model, mesh=mesh), "int4")


@pytest.mark.parametrize(
    "wrap",
    [in_torchs_ddp, in_own_ddp, pytest.param(in_replicate, marks=replicate_of_fsdp)],
    ids=lambda wrap: wrap.__name__,
)
def test_a_state_comes_back_to_the_part_that_it_is_of_alone(ranks, wrap, tmp_path):
    answers = ranks.run(of_another_part, 2, wrap, str(tmp_path))
    assert len({key for keys, _ in answers for key in keys if key != "gradwire"}) == 2
    assert all("load each rank's own" in text for _, text in answers)
