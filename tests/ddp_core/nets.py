"""Random models of float64 inputs (rows, WIDTH), and how two ways of training them are compared."""

from dataclasses import dataclass, field

import torch
from torch import nn

WIDTH, ROWS, TOKENS = 6, 4, 11
RATE = 0.05


def linear(dtype=torch.float64):
    return nn.Linear(WIDTH, WIDTH, dtype=dtype)


class Twice(nn.Module):
    """One layer used twice."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, inputs, batch):
        return self.layer(self.layer(inputs).tanh())


class Tied(nn.Module):
    """Two layers with one weight, under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.weight = self.first.weight

    def forward(self, inputs, batch):
        return self.second(self.first(inputs).tanh() @ self.first.weight)


class Conditional(nn.Module):
    """One of three layers, or none; another one on every rank and in every step."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(linear() for _ in range(3))

    def forward(self, inputs, batch):
        return inputs if batch.choice == 3 else self.branches[batch.choice](inputs)


class Unused(nn.Module):
    """A layer that is never called beside one that is."""

    def __init__(self):
        super().__init__()
        self.idle, self.busy = linear(), linear()

    def forward(self, inputs, batch):
        return self.busy(inputs)


class Single(nn.Module):
    """A part in float32."""

    def __init__(self):
        super().__init__()
        self.layer = linear(torch.float32)

    def forward(self, inputs, batch):
        return self.layer(inputs.float()).double()


class Complex(nn.Module):
    """A complex matrix, laid out column by column."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128).t() / 4)

    def forward(self, inputs, batch):
        return (inputs.to(torch.complex128) @ self.matrix).abs()


class Frozen(nn.Module):
    """A layer whose weight is not trained."""

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.layer.weight.requires_grad_(False)

    def forward(self, inputs, batch):
        return self.layer(inputs)


class ChannelsLast(nn.Module):
    """A channels-last convolution."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64).to(memory_format=torch.channels_last)

    def forward(self, inputs, batch):
        return self.layer(inputs.view(len(inputs), 2, -1, 1)).reshape(inputs.shape)


class Gaps(nn.Module):
    """A weight that is every other column of a larger one, and a scalar."""

    def __init__(self):
        super().__init__()
        self.sparse_columns = nn.Parameter((torch.randn(WIDTH, 2 * WIDTH, dtype=torch.float64) / 4)[:, ::2])
        self.scalar = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs, batch):
        return inputs @ self.sparse_columns * self.scalar


class SparseRows(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(TOKENS, WIDTH, sparse=True, dtype=torch.float64)

    def forward(self, inputs, batch):
        return inputs + self.rows(batch.tokens)


class Large(nn.Module):
    """A weight above the size from which gradients are copied one by one."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = (nn.Parameter(torch.randn(WIDTH, 1000, dtype=torch.float64) / 30) for _ in range(2))

    def forward(self, inputs, batch):
        return (inputs @ self.inner).tanh() @ self.outer.t()


ALWAYS = (Twice, Tied, Single, Complex, Frozen, ChannelsLast, Gaps, SparseRows, Large)
PARTS = (*ALWAYS, Unused, Conditional)


@dataclass(frozen=True)
class Batch:
    """What a rank feeds in a micro-batch: numbers, tokens, and the branch that a conditional part takes."""

    inputs: torch.Tensor
    tokens: torch.Tensor
    choice: int

    @classmethod
    def drawn(cls, *seeds):
        """A batch that depends on rank, step and micro-batch."""
        generator = torch.Generator().manual_seed(hash(seeds) % 2**31)
        inputs = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        tokens, choice = (torch.randint(high, (ROWS,), generator=generator) for high in (TOKENS, 4))
        return cls(inputs, tokens, int(choice[0]))


class Net(nn.Module):
    """Some parts, one after the other, between two layers that are always used."""

    def __init__(self, parts, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.last = linear(), linear()
            self.parts = nn.ModuleList(part() for part in parts)

    def forward(self, batch):
        values = self.first(batch.inputs)
        for part in self.parts:
            values = values + part(values, batch).tanh()
        return self.last(values)


def loss_of(output):
    return output.square().mean()


def descend(model):
    """A step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-RATE)


def same(left, right):
    """Whether two lists of tensors (or None) have the same bits."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )


def close(left, right, tolerance=1e-9):
    """The largest difference between two lists of tensors, over what rounding may make."""
    return (
        max(((a - b).abs().max().item() for a, b in zip(left, right, strict=True) if a.numel()), default=0) < tolerance
    )


@dataclass(frozen=True)
class Settings:
    """How a model is trained."""

    options: dict = field(default_factory=dict)  # of DistributedDataParallel, torch's and ours
    skip: bool = False  # skip_all_reduce_unused_params, in ours
    micro_batches: int = 1
    set_to_none: bool = True
    steps: int = 7  # in the last of them few parameters have hooks
