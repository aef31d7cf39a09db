"""What `replicate` can be set to, trained as without gradwire; and what is refused, with what to do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradwire

from ..fsdp.given import seen_by_a_hook
from .given import bare, gradients, inputs, network, trained, values


def frozen(model):
    for name in ("0.weight", "2.0.bias"):
        model.get_parameter(name).requires_grad_(False)
    return model


def frozen_whole(model):
    model[0].requires_grad_(False)
    return model


def divided(model):
    for module in (model[0], model[2], model):
        module.set_gradient_divide_factor(7.0)
        module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply while it adds up
    return model


def accumulated(model, rank):
    """A backward that is not synchronized and one that is, three times; gradients then step together."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(6):
        model.set_requires_gradient_sync(batch % 2 == 1)
        model(inputs(rank, batch)).square().mean().backward()
        if batch % 2:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def accumulated_in_torchs_buffers(model, rank):
    """The same by `set_requires_all_reduce`, which has torch add gradients up in a buffer of its own."""
    for batch in range(3):
        model.set_requires_all_reduce(batch == 2)
        model(inputs(rank, batch)).square().mean().backward()
    return gradients(model)


def added_up(model, rank):
    """Two synchronized backwards before a step."""
    for batch in range(2):
        model(inputs(rank, batch)).square().mean().backward()
    return trained(model, rank, 1)


def clipped(model, rank):
    model(inputs(rank, 0)).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return {"norm": norm.full_tensor(), **gradients(model)}


def hooked(model, rank):
    seen = seen_by_a_hook(model)
    after = trained(model, rank, 2)
    return {str(step): grad for step, grad in enumerate(seen)} | after


def unused(model, rank):
    """Steps that leave a module out on all ranks, in between ones that use it."""
    for step in range(4):
        hidden = model[1](model[0](inputs(rank, step)))
        hidden = model[2](hidden) if step % 2 == 0 else hidden[:, :20]
        model[3](hidden).square().mean().backward()
    return gradients(model)


class Checkpointed(nn.Module):
    """Modules that run once more in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 33), nn.Linear(33, 5)

    def forward(self, batch):
        hidden = checkpoint(self.first, batch, use_reentrant=False)
        return checkpoint(self.second, hidden.relu(), use_reentrant=False)


def checkpointed():
    return network(Checkpointed(), ("first", "second", ""))


def replicated_last():
    """The root's last module is replicated by itself, so that it can be called by itself."""
    return network(parts=("0", "2", "3"))


HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
HALF_SUMS = MixedPrecisionPolicy(torch.bfloat16)
CASES = {  # name: the model, what changes it before attach, its use
    "frozen parameters": (network, frozen, trained),
    "a frozen module": (network, frozen_whole, trained),
    "accumulation": (network, None, accumulated),
    "accumulation in torch's buffers": (network, None, accumulated_in_torchs_buffers),
    "gradients that add up": (network, None, added_up),
    "a divisor of the user's": (network, divided, trained),
    "clipping": (network, None, clipped),
    "a hook of a gradient": (network, None, hooked),
    "a module that is left out": (replicated_last, None, unused),
    "activation checkpointing": (checkpointed, None, trained),
    "computed in bf16": (lambda: network(mp_policy=HALF), None, trained),
    "sums in bf16": (lambda: network(mp_policy=HALF_SUMS), None, trained),
    "CPU offload": (lambda: network(offload_policy=CPUOffloadPolicy(pin_memory=False)), None, trained),
}


def both(rank, world_size, case, spec):
    """What a use makes of a model, without gradwire and with it; and the steps that it counts."""
    make, change, use = CASES[case]
    answers = []
    with torch.backends.mkldnn.flags(enabled=False):  # which refuses bf16 on some processors
        for ours in (False, True):
            model = make()
            model = change(model) if change else model
            handle = gradwire.attach(model, spec) if ours else None
            answers.append(use(model, rank))
    steps = handle.metrics()["steps"]
    handle.close()
    return *answers, steps


@pytest.mark.parametrize("case", CASES)
def test_uncompressed_it_does_to_the_bit_what_torch_does(ranks, case):
    for theirs, ours, _ in ranks.run(both, 2, case, "none"):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("case", ["computed in bf16", "sums in bf16"])
def test_mixed_precision_trains_with_a_lossy_compressor_as_without(ranks, case):
    answers = ranks.run(both, 2, case, "int8")
    for theirs, ours, _ in answers:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.01)
        torch.testing.assert_close(ours, answers[0][1], rtol=0, atol=0)  # alike on all ranks
        assert not all(torch.equal(ours[name], theirs[name]) for name in ours), "nothing was compressed"


@pytest.mark.parametrize("case", ["accumulation", "frozen parameters", "activation checkpointing"])
def test_only_synchronized_backwards_are_steps(ranks, case):
    answers = ranks.run(both, 2, case, "powersgd:rank=2")
    for _, ours, steps in answers:
        assert steps == (3 if case == "accumulation" else 4)
        torch.testing.assert_close(ours, answers[0][1], rtol=0, atol=0)


def refused(rank, world_size, make, arguments, error):
    with pytest.raises(error) as raised:
        gradwire.attach(make(), **arguments)
    return str(raised.value)


def mixed():
    model, mesh = bare(), init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    fully_shard(model[0], mesh=mesh)
    return network(model, ("2", "3"))


def on_two_meshes():
    model = network(parts=("0",))
    return network(model, ("2",), mesh=DeviceMesh.from_group(dist.new_group([0, 1]), "cpu", mesh_dim_names=("ranks",)))


def attached():
    model = network()
    gradwire.attach(model, "int8")
    return model


MIXED = "modules of fully_shard (0) and of replicate (2, 3): attach to each part"
REFUSED = {  # name: the model, what attach is given, the error, words of its message
    "no compressor": (network, {}, TypeError, "takes a compressor"),
    "options of shards": (network, {"compressor": "int8", "gather": "int8"}, TypeError, "a replicated model"),
    "sharded modules": (mixed, {"compressor": "int8"}, ValueError, MIXED),
    "sharded modules, by options of shards": (mixed, {"gather": "int8", "reduce": "int8"}, ValueError, MIXED),
    "a second handle": (attached, {"compressor": "int8"}, ValueError, "close() the handle first"),
    "modules on two meshes": (
        on_two_meshes,
        {"compressor": "int8"},
        ValueError,
        "on different process groups: attach to each",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_do(ranks, case):
    make, arguments, error, words = REFUSED[case]
    assert all(words in answer for answer in ranks.run(refused, 2, make, arguments, error))


def by_parts(rank, world_size):
    """Parameters after a training of a model with sharded and replicated modules, by torch and by a handle for each part."""
    answers = []
    for ours in (False, True):
        model = mixed()
        handles = [gradwire.attach(model[0], gather="none", reduce="none")] if ours else []
        handles += [gradwire.attach(model[place], "none") for place in (2, 3)] if ours else []
        answers.append(trained(model, rank))
        for handle in handles:
            handle.close()
    return answers


def test_sharded_and_replicated_parts_each_with_a_handle_train_as_torch_does(ranks):
    for theirs, ours in ranks.run(by_parts, 2):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


class OneOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, batch):
        return self.a(batch)


def partly_used(rank, world_size, told):
    """The error, or gradients, of a backward that leaves parameters of a module out."""
    model = network(OneOfTwo(), ("",))
    if told:
        model.set_reduce_scatter_unused_params(True)
    handle = gradwire.attach(model, "powersgd:rank=1")
    try:
        model(inputs(rank, 0)).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        handle.close()
    return gradients(model)


def test_a_module_of_which_a_part_is_left_out_is_refused_unless_torch_fills_in_zeros(ranks):
    assert all("set_reduce_scatter_unused_params(True)" in answer for answer in ranks.run(partly_used, 2, told=False))
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        return
    for found in ranks.run(partly_used, 2, told=True):
        assert found["a.weight"].any()
        assert not found["b.weight"].any()
