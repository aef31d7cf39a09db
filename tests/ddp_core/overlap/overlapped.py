"""Models whose averages come late, trained with and without overlap."""

import torch
from torch import nn

import gradwire
from gradwire.ddp_core import Link, Paced

RATE = 4e6  # bytes a second of the emulated link: a step's gradients take some milliseconds
SLICE_MB = 0.004
STEPS = 4
BATCH = 4


class Net(nn.Module):
    """Layers that torch reaches in several ways: plain, tied, by a function, recurrent, and attention."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.recurrent = nn.LSTM(16, 16, batch_first=True)
        self.by_function = nn.Parameter(torch.randn(16, 16))
        self.large = nn.Linear(16, 256)
        self.back = nn.Linear(256, 16)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0])
        hidden = self.recurrent(hidden)[0]
        hidden = nn.functional.linear(hidden, self.by_function).tanh()
        hidden = self.back(self.large(hidden).relu())
        return nn.functional.linear(hidden, self.embed.weight)


class Plain(nn.Sequential):
    """A few layers, with running statistics."""

    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64), nn.Linear(64, 16))


class Layers(nn.Sequential):
    """Layers whose gradients are never zero."""

    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16))


def slow(inner):
    """A transport behind a slow link."""
    return Paced(inner, Link(RATE))


class Setting:
    """A model, its optimizer, and inputs, the same ones whenever it is made; `order`: as for overlap, None is without."""

    def __init__(
        self,
        rank,
        order,
        *,
        net=Net,
        compressor="none",
        optimizer=torch.optim.AdamW,
        link=slow,
        slice_mb=SLICE_MB,
        device="cpu",
        **options,
    ):
        torch.manual_seed(0)
        self.rank, self.device, self.names = rank, device, []
        self.generator = torch.Generator().manual_seed(rank)
        options |= {"compressor": compressor, "transport": link}
        self.model = gradwire.DistributedDataParallel(net().to(device), **options)
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)
        if order:
            self.optimizer = gradwire.overlap(self.model, self.optimizer, order=order, slice_mb=slice_mb)

    def loss(self, model=None):
        """Of a batch of this rank's own."""
        model = model or self.model
        if isinstance(self.model.module, Net):
            tokens = torch.randint(16, (BATCH, 6), generator=self.generator).to(self.device)
            return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        return model(torch.randn(BATCH, 16, generator=self.generator).to(self.device)).square().mean()

    def step(self):
        """One step as a user writes it."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    @property
    def pending(self):
        """Whether updates are under way."""
        return self.model._overlap is not None and self.model._overlap.pending

    def end(self):
        """Parameters, buffers and optimizer state, as they are now."""
        state = self.optimizer.state_dict()["state"]
        fields = [state[index][field] for index in sorted(state) for field in sorted(state[index])]
        numbers = [each for each in fields if isinstance(each, torch.Tensor)]
        found = [*self.model.state_dict().values(), *numbers]
        self.model.compression.close()
        return [each.clone() for each in found]


def equal(one, other):
    """Whether two results are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other
