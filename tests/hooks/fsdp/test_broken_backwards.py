"""A training behind a backward that raised: refused where torch changes parameters no more, and nowhere else."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire

from ...ddp_core.errors import message_of
from ...torch_versions import fsdp_of_others

pytestmark = fsdp_of_others
REFUSED = "RuntimeError: a backward of this model raised an error, and since then"


def fail(_):
    raise ZeroDivisionError("on purpose")


def after_an_error(rank, world_size, where):
    """What a backward raises that fails at a layer, or at the loss, and the forward behind it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (model[0], model[1], *([] if where == "plain head" else [model])):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
    handle = gradwire.attach(model, gather="int8", reduce="int8")
    model(torch.ones(2, 4)).sum().backward()
    older, then = model(torch.ones(2, 4)).sum(), model[0](torch.ones(2, 4))
    output = model[2](middle := model[1](then))
    {"loss": output, "plain head": output}.get(where, middle).register_hook(fail)
    first = message_of(output.sum().backward)
    if where == "middle, before an older graph":
        older.backward()
    second = message_of(model, torch.ones(2, 4))
    handle.close()
    return first, second


@pytest.mark.parametrize(
    ("where", "refused"),
    [("loss", False), ("plain head", False), ("middle", True), ("middle, before an older graph", True)],
)
def test_a_training_is_refused_where_torch_has_not_ended_the_backward(ranks, where, refused):
    for first, second in ranks.run(after_an_error, 2, where):
        assert first == "ZeroDivisionError: on purpose"
        assert second.startswith(REFUSED) if refused else not second
