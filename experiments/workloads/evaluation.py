"""The validation loss of a trained model, and a digest of its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ...compress import AllReduce
from ...ddp_core import ask, exchange, over
from ..results.comparison import Evaluation
from .data import Dataset
from .sample import Batch


def evaluate(
    model: nn.Module, dataset: Dataset, batch_size: int, batches: int, group: dist.ProcessGroup, device: torch.device
) -> Evaluation:
    """Return loss and accuracy on `batches` validation batches, which the ranks share."""
    share = islice(dataset.evaluation_batches(batch_size, batches), group.rank(), None, group.size())
    return evaluation_of(ask(AllReduce(held_out_sums(model, share, device)), over(group)))


@torch.no_grad()
def held_out_sums(model: nn.Module, batches: Iterator[Batch], device: torch.device) -> Tensor:
    """Loss, right answers and answers of the batches, summed: (3,) float64."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        logits = model(inputs.to(device)).flatten(0, -2)
        expected = targets.to(device).flatten()
        loss = functional.cross_entropy(logits, expected, reduction="sum")
        hits = (logits.argmax(-1) == expected).sum()
        sums += torch.stack([loss.double(), hits.double(), torch.tensor(expected.numel(), device=device)])
    model.train()
    return sums


def evaluation_of(sums: Tensor) -> Evaluation:
    """The means, from the sums of all batches or their mean over ranks."""
    loss_sum, hit_sum, count = sums.tolist()
    return Evaluation(loss=loss_sum / count, accuracy=hit_sum / count)


def same_digest(model: nn.Module, group: dist.ProcessGroup) -> str:
    """A digest of all parameters; RuntimeError unless it is the same on every rank."""
    digests = exchange(digest_of(model), over(group))
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks ended with different parameters: {digests}")
    return digests[0]


def digest_of(model: nn.Module) -> str:
    """SHA-256 of all parameters, in hexadecimal digits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
