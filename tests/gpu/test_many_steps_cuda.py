"""A thousand steps: ranks on a GPU keep the same parameters, to the bit."""

import pytest
import torch
from torch import nn

from gradwire.ddp_core.transport.rank_messages import checksum

from .test_training_cuda import ddp_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STEPS, EVERY = 1000, 50
WIDTH = 32


def compared(rank, world_size, spec, own, device="cuda"):
    """Digests of the parameters now and then, the parameters at the end, on the CPU, and the first and the last loss."""
    if device == "cuda":
        torch.cuda.set_device(0)
    torch.manual_seed(0)
    ddp, handle = ddp_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).to(device), spec, own)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device)
    goals, digests, losses = inputs[:, :4].sin(), [], []
    for step in range(STEPS):
        loss = (ddp(inputs) - goals).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            digests.append(checksum(list(ddp.parameters())))
            losses.append(loss.item())
    handle.close()
    return digests, [parameter.detach().cpu() for parameter in ddp.parameters()], (losses[0], losses[-1])


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
@pytest.mark.parametrize("spec", ["powersgd:rank=2", "onebit:block=64"])
def test_after_a_thousand_steps_ranks_have_the_same_bits(ranks, spec, own):
    (digests, parameters, (first, last)), other = ranks.run(compared, 2, spec, own, timeout=280)
    assert digests == other[0]
    assert len({*digests}) == STEPS // EVERY
    assert all(map(torch.equal, parameters, other[1]))
    assert last < 0.9 * first
