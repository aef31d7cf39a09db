"""Models for trials: the parts of `tests/ddp_core/nets.py` and a few more, by name."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..ddp_core import nets
from ..ddp_core.nets import TOKENS, WIDTH, linear


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)

    def forward(self, inputs, batch):
        return self.norm(inputs)


class DenseRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(TOKENS, WIDTH, dtype=torch.float64)

    def forward(self, inputs, batch):
        return inputs + self.rows(batch.tokens)


class Brief(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear(torch.bfloat16)

    def forward(self, inputs, batch):
        return self.layer(inputs.bfloat16()).double()


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH, dtype=torch.float64))
        self.layer = linear()

    def forward(self, inputs, batch):
        return self.layer(inputs) + self.nothing.sum()


class Recomputed(nn.Module):
    """A layer that backward computes again."""

    reentrant = False

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, inputs, batch):
        return checkpoint(self.layer, inputs, use_reentrant=self.reentrant)


class RecomputedInside(Recomputed):
    """A layer that a backward of its own computes again."""

    reentrant = True


MORE = (Normed, DenseRows, Brief, Empty, Recomputed, RecomputedInside)
PARTS = {part.__name__: part for part in (*nets.PARTS, *MORE)}
LEAVES_OUT = frozenset({"Conditional"})  # some parameters in some steps
NEVER_USES = frozenset({"Unused"})
SPARSE = frozenset({"SparseRows"})
REENTRANT = frozenset({"RecomputedInside"})


class Headed(nets.Net):
    """A network with a second output beside the first one."""

    def __init__(self, parts, seed):
        super().__init__([PARTS[name] for name in parts], seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.aside = linear()

    def forward(self, batch):
        """{"main": values, "aside": [values]}; losses may leave the second one out."""
        main = super().forward(batch)
        return {"main": main, "aside": [self.aside(main)]}


def loss_of(outputs, both):
    """`both`: whether the loss depends on the second output."""
    return nets.loss_of(outputs["main"]) + (nets.loss_of(outputs["aside"][0]) if both else 0.0)
