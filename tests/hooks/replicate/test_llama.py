"""A Llama of torchtitan's structure, wrapped as torchtitan wraps its own: one line compresses its gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import gradwire

from .given import local, replicate

WORDS, WIDTH, HEADS, KEY_HEADS, LENGTH, BLOCKS = 32, 16, 4, 2, 8, 1
IN_BLOCKS = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "feed_forward.w3": ColwiseParallel(),
}
AROUND_BLOCKS = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def rotations():
    """The rotary embedding: a complex number for each place and pair of features."""
    half = WIDTH // HEADS // 2
    angles = torch.outer(torch.arange(LENGTH).float(), 10000.0 ** (-torch.arange(half) / half))
    return torch.polar(torch.ones_like(angles), angles)


def rotated(heads, turns):
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


class Attention(nn.Module):
    """Heads of queries, of which several share keys and values; each rank of tensor parallelism has some."""

    def __init__(self):
        super().__init__()
        self.size = WIDTH // HEADS
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, KEY_HEADS * self.size, bias=False) for _ in range(2))

    def forward(self, hidden, turns):
        query, key, value = (each(hidden).unflatten(-1, (-1, self.size)) for each in (self.wq, self.wk, self.wv))
        key, value = (each.repeat_interleave(HEADS // KEY_HEADS, dim=2) for each in (rotated(key, turns), value))
        heads = [each.transpose(1, 2) for each in (rotated(query, turns), key, value)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        return self.w2(functional.silu(self.w1(hidden)) * self.w3(hidden))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, hidden, turns):
        hidden = hidden + self.attention(self.attention_norm(hidden), turns)
        return hidden + self.feed_forward(self.ffn_norm(hidden))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(place): Block() for place in range(BLOCKS)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("turns", rotations(), persistent=False)

    def forward(self, tokens):
        hidden = self.tok_embeddings(tokens)
        for block in self.layers.values():
            hidden = block(hidden, self.turns)
        return self.output(self.norm(hidden))


def llama(mesh):
    torch.manual_seed(0)
    model = Llama()
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], AROUND_BLOCKS)
        for block in model.layers.values():
            parallelize_module(block, mesh["tp"], IN_BLOCKS)
    for part in (model.tok_embeddings, *model.layers.values(), [model.norm, model.output], model):
        replicate(part, mesh=mesh["dp"])
    return model


def trained(model, place, steps):
    """Losses of steps on texts that count up, and the parameters after them."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(steps):
        first = torch.randint(WORDS, (4, 1), generator=torch.Generator().manual_seed(100 * place + step))
        text = (first + torch.arange(LENGTH + 1)) % WORDS
        loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: local(each.detach()).clone() for name, each in model.named_parameters()}


def compressed(rank, world_size, tensor_parallel, steps):
    """Losses and parameters by torch's averages, and by ours with a compressor."""
    mesh = init_device_mesh("cpu", (2, tensor_parallel), mesh_dim_names=("dp", "tp"))
    place = mesh.get_coordinate()[0]
    answers = {"torch": trained(llama(mesh), place, steps)}
    for spec in ("none", "int4"):
        model = llama(mesh)
        handle = gradwire.attach(model, spec)
        answers[spec] = trained(model, place, steps)
        handle.close()
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(("tensor_parallel", "steps"), [(1, 12), (2, 3)])
def test_one_line_compresses_a_llama_and_without_compression_it_trains_as_by_torch(ranks, tensor_parallel, steps):
    every = ranks.run(compressed, 2 * tensor_parallel, tensor_parallel, steps)
    for answers in every:
        torch.testing.assert_close(answers["none"], answers["torch"], rtol=1e-5, atol=1e-6)
        (before, *_, exact), (*_, after) = answers["torch"][0], answers["int4"][0]
        assert exact < before * (0.9 if steps > 3 else 1)
        assert abs(after - exact) < 0.2 * (before - exact)
        assert not torch.equal(answers["int4"][1]["output.weight"], answers["none"][1]["output.weight"])
    for one, other in zip(every[:tensor_parallel], every[tensor_parallel:], strict=True):
        torch.testing.assert_close(one["int4"][1], other["int4"][1], rtol=0, atol=0)  # of data parallelism
