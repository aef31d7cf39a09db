"""torchtitan's own Llama, wrapped by its own function so that each rank has the whole model; skipped without its wheel."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import gradwire

from ..frameworks.launched import TIMEOUT, needing
from .given import whole

LENGTH, STEPS = 16, 3


def llama(world_size):
    """Two blocks of its smallest Llama; attention by torch's function, since the default one is compiled."""
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import Llama3Model, llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = Llama3Model(config)
    model.init_states()
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp_replicate", "fsdp"))
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    return model


def trained(model, rank, world_size):
    """Losses of steps, each the sum over tokens by their number on all ranks, as its trainer has it; the parameters."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(STEPS):
        first = torch.randint(64, (2, 1), generator=torch.Generator().manual_seed(100 * rank + step))
        text = (first + torch.arange(LENGTH + 1)) % 64
        logits = model(text[:, :-1]).flatten(0, 1)
        loss = cross_entropy(logits, text[:, 1:].flatten(), reduction="sum") / (2 * LENGTH * world_size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() * world_size)
    return losses, whole(model)


def compressed(rank, world_size):
    """{compressor: losses and parameters}, by torch's averages and by ours."""
    answers = {"torch": trained(llama(world_size), rank, world_size)}
    for spec in ("none", "int4", "powersgd:rank=4"):
        model = llama(world_size)
        handle = gradwire.attach(model, replicas=spec)
        answers[spec] = trained(model, rank, world_size)
        assert handle.replicas.metrics()["steps"] == STEPS
        handle.close()
    return answers


@needing("torchtitan")
def test_one_line_compresses_torchtitans_llama(ranks):
    every = ranks.run(compressed, 2, timeout=TIMEOUT)
    for answers in every:
        losses, parameters = answers["torch"]
        torch.testing.assert_close(answers["none"], (losses, parameters), rtol=1e-4, atol=1e-5)
        for spec in ("int4", "powersgd:rank=4"):
            torch.testing.assert_close(answers[spec][1], every[0][spec][1], rtol=0, atol=0)  # alike on all ranks
            assert not torch.equal(answers[spec][1]["lm_head.weight"], parameters["lm_head.weight"]), spec
            assert answers[spec][0][-1] < losses[0], spec
        assert abs(answers["int4"][0][-1] - losses[-1]) < 0.2 * (losses[0] - losses[-1])
