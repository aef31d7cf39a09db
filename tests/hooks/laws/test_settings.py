"""What modules of torch's `fully_shard` and `replicate` can be set to: they train with gradwire as without."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import gradwire

from ..fsdp.given import GivenParts, divided, seen_by_a_hook
from ..replicate.given import bare, inputs, replicate, step_of
from .wrappers import WHOLE, Training, held, over, whole

STEPS = 4
WRAPS = {"FSDP2": fully_shard, "replicate": replicate}


def network(wrapper, model=bare, parts=("0", "2", ""), **options):
    model, mesh = model(), init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("ranks",))
    for part in parts:
        WRAPS[wrapper](model.get_submodule(part), mesh=mesh, **options)
    return model


def trained(model, rank, steps=STEPS):
    """{name: parameter} after some steps."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for step in range(steps):
        step_of(model, optimizer, inputs(rank, step))
    return {name: whole(each.detach()).clone() for name, each in model.named_parameters()}


def gradients(model):
    return {name: whole(each.grad).clone() for name, each in model.named_parameters() if each.grad is not None}


def frozen(model):
    for name in ("0.weight", "2.0.bias"):
        model.get_parameter(name).requires_grad_(False)
    return model


def frozen_whole(model):
    model[0].requires_grad_(False)
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
    return trained(model, rank, 0)


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
    """Norms of clipped gradients are those of whole ones."""
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


def prefetching(model, rank):
    model.set_modules_to_forward_prefetch([model[0], model[2]])
    return trained(model, rank)


class Checkpointed(nn.Module):
    """Modules that run once more in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 33), nn.Linear(33, 5)

    def forward(self, batch):
        hidden = checkpoint(self.first, batch, use_reentrant=False)
        return checkpoint(self.second, hidden.relu(), use_reentrant=False)


def second_axis(parameter):
    return Shard(parameter.dim() - 1) if parameter.shape[-1] % 4 == 0 else None


BOTH = {  # what wraps the model is given, what changes it before attach, its use
    "frozen parameters": ({}, frozen, trained),
    "a frozen module": ({}, frozen_whole, trained),
    "accumulation": ({}, None, accumulated),
    "gradients that add up": ({}, None, added_up),
    "a divisor of the user's": ({}, divided, trained),
    "clipping": ({}, None, clipped),
    "a hook of a gradient": ({}, None, hooked),
    "a module that is left out": ({"parts": ("0", "2", "3")}, None, unused),  # whose last one can be called by itself
    "activation checkpointing": ({"model": Checkpointed, "parts": ("first", "second", "")}, None, trained),
    "computed in bf16": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, None, trained),
    "sums in bf16": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, None, trained),
    "CPU offload": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, None, trained),
}
CASES = {
    "replicate": BOTH | {"accumulation in torch's buffers": ({}, None, accumulated_in_torchs_buffers)},
    "FSDP2": BOTH
    | {
        "forward prefetch": ({}, None, prefetching),
        "resharded after forward to 2": ({"reshard_after_forward": 2}, None, trained),
        "no reshard": ({"reshard_after_forward": False}, None, trained),
        "cut along the second axis": ({"shard_placement_fn": second_axis}, None, trained),
    },
}
ATTACH = {
    "replicate": ({"compressor": "none"}, {"compressor": "int8"}),
    "FSDP2": ({}, {"gather": "int8", "reduce": "int8"}),
}
STEPS_OF = {trained: STEPS, accumulated: 3, prefetching: STEPS}  # only backwards that are synchronized count
LOSSY = ("computed in bf16", "a hook of a gradient", "resharded after forward to 2", "clipping", "accumulation")


def all_cases(rank, world_size, wrapper, names):
    """{case: what a use makes of a model without gradwire, with it, and compressed}."""
    found = {}
    with torch.backends.mkldnn.flags(enabled=False):  # which refuses bf16 on some processors
        for name in names:
            options, change, use = CASES[wrapper][name]
            found[name] = []
            for arguments in (None, *ATTACH[wrapper][: 2 if name in LOSSY else 1]):
                model = network(wrapper, **options)
                model = change(model) if change else model
                handle = gradwire.attach(model, **arguments) if arguments is not None else None
                found[name].append(use(model, rank))
                if handle is not None:
                    assert handle.metrics()["steps"] == STEPS_OF.get(use, handle.metrics()["steps"]), name
                    handle.state_dict()
                    handle.close()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
@over("replicate", "FSDP2")
def test_it_trains_as_torch_does_whatever_a_module_is_set_to(ranks, wrapper, world_size):
    names = [name for name in CASES[wrapper] if (world_size == 4) == (" 2" in name or "axis" in name)]
    if not names:
        pytest.skip("no setting of it takes four ranks")
    answers = ranks.run(all_cases, world_size, wrapper, names, timeout=120)
    for answer in answers:
        for name, (theirs, ours, *compressed) in answer.items():
            # torch's bits where a sum of two has one order; it adds up shards in bf16, and we in float32
            exact = 0 if wrapper == "replicate" else 2e-3 if name == "sums in bf16" else 1e-6
            torch.testing.assert_close(
                ours, theirs, rtol=exact, atol=exact, msg=lambda text, name=name: f"{name}: {text}"
            )
            for each in compressed:
                torch.testing.assert_close(
                    each, theirs, rtol=3e-2, atol=3e-2, msg=lambda text, name=name: f"{name}: {text}"
                )
                torch.testing.assert_close(each, answers[0][name][2], rtol=0, atol=0)  # alike on all ranks
                assert not all(torch.equal(each[part], theirs[part]) for part in each), "nothing was compressed"


def held_back(rank, world_size, wrapper):
    """Whether int4 keeps residuals: with SGD, with AdamW, and after a swap there and back, which takes the same one."""
    found = []
    for kind in (partial(torch.optim.SGD, lr=0.1), torch.optim.AdamW):
        training = Training(wrapper, "int4", model := GivenParts(), optimizer=kind(model.parameters()))
        for specs in ((), ("bf16", "int4")):
            for spec in specs:
                training.swap(spec)
            training.step(0)
            states = held(training.handle.state_dict()).values()
            found.append(any(numbers.any() for fields in states for numbers in fields.values()))
        training.close()
    return found


@over(*WHOLE, "FSDP2", "replicas")
def test_int4_keeps_a_residual_with_sgd_and_none_with_adam_also_after_a_swap(ranks, wrapper):
    assert ranks.run(held_back, 2, wrapper) == [[True, True, False, False]] * 2
