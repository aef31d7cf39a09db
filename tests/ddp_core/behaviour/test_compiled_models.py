"""A compiled model under each wrapper: graphs, no recompilation after warm-up, buckets that leave before backward's end."""

import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh

import gradwire
from gradwire.ddp_core.averaging.plans import ProgramPlan

from ...torch_versions import compiled_backward_of_fsdp, fsdp_of_others, replicate_of_fsdp
from ..wrapping import wrapped

LAYERS, WIDTH = 3, 600  # each layer more than the 1 MB that torch's first bucket has
WARM_UP, STEPS = 3, 4
SPEC = "int8"


class Layer(nn.Module):
    """A layer whose forward is not torch's own, which is not compiled by itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        return self.linear(inputs).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def network():
    torch.manual_seed(0)
    return Net()


def torch_s(world_size):
    return *wrapped(False, network(), SPEC, bucket_cap_mb=1), None


def own(world_size):
    return *wrapped(True, network(), SPEC, bucket_cap_mb=1), None


def overlapped(world_size):
    model, handle, _ = own(world_size)
    return model, handle, gradwire.overlap(model, torch.optim.SGD(model.parameters(), 0.1))


def by_layer(world_size, apply):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("replicas",))
    model = network()
    for layer in (*model.layers, model):
        apply(layer, mesh=mesh)
    return model


def replicated(world_size):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = by_layer(world_size, replicate)
    return model, gradwire.attach(model, SPEC), None


def sharded(world_size):
    from torch.distributed.fsdp import fully_shard

    model = by_layer(world_size, fully_shard)
    return model, gradwire.attach(model, gather="none", reduce=SPEC), None


def trained(rank, world_size, build, compiled):
    """Parameters, graphs at the end of warm-up and at the end, and the order of gradients' graphs and buckets in a step."""
    model, handle, optimizer = build(world_size)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    graphs, events, warm = [], [], 0

    def forward_graph(graph, _):
        graphs.append(graph)
        return graph

    def backward_graph(graph, _):
        def run(*inputs):
            events.append("gradients")
            return graph(*inputs)

        return run

    backend = aot_autograd(fw_compiler=forward_graph, bw_compiler=backward_graph)
    run = torch.compile(model, backend=backend) if compiled else model
    start = ProgramPlan.start

    def noted(*arguments, **named):
        events.append("bucket")
        return start(*arguments, **named)

    with mock.patch.object(ProgramPlan, "start", noted):
        for step in range(WARM_UP + STEPS):
            warm = len(graphs) if step <= WARM_UP else warm
            events.clear()
            generator = torch.Generator().manual_seed(100 * rank + step)
            run(torch.randn(2, WIDTH, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        parameters = [getattr(each, "_local_tensor", each).detach().clone() for each in model.parameters()]
    handle.close()
    return parameters, warm, len(graphs), list(events)


def both(rank, world_size, build):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [trained(rank, world_size, build, compiled) for compiled in (False, True)]


CASES = {  # wrapper: (its making, graphs of the model)
    "attach": (torch_s, LAYERS),  # a graph for each bucket
    "own DDP": (own, LAYERS),
    "overlap": (overlapped, LAYERS),
    "replicate": (replicated, 2),  # a graph for each kind of wrapped module: the first one's input needs no gradient
    "FSDP2": (sharded, 2),
}
NEWER = {"replicate": replicate_of_fsdp, "FSDP2": fsdp_of_others}


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, marks=NEWER.get(case, ())) for case in CASES])
def test_a_compiled_model_is_not_compiled_again_and_trains_as_in_python(ranks, case):
    build, count = CASES[case]
    for (expected, *_), (found, warm, graphs, events) in ranks.run(both, 2, build, timeout=110):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert warm == graphs == count
        if case != "FSDP2":  # torch reduces its gradients
            assert events.index("bucket") < len(events) - 1 - events[::-1].index("gradients"), "nothing overlaps"


def between(rank, world_size, build, change):
    """Parameters after steps where the compiler is reset or first used between forward and backward, and in Python."""
    answers = []
    for compiled in (False, True):
        model, handle, optimizer = build(world_size)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * rank + step)
            loss = model(torch.randn(2, WIDTH, generator=generator)).square().mean()
            if compiled and change == "reset":
                torch._dynamo.reset()
            (torch.compile(backwards, backend="eager") if compiled else backwards)(loss)
            optimizer.step()
            optimizer.zero_grad()
        answers.append([getattr(each, "_local_tensor", each).detach().clone() for each in model.parameters()])
        handle.close()
    return answers


def backwards(loss):
    loss.backward()


CHANGES = {  # case: in make test, and in make test-all alone
    "attach": ("compile", "reset"),
    "own DDP": ("reset", "compile"),
    "replicate": ("reset", "compile"),
    "FSDP2": ("compile", "reset"),
}


@pytest.mark.parametrize(
    ("case", "change"),
    [
        pytest.param(case, change, marks=[*marks, *([compiled_backward_of_fsdp] if case in NEWER else [])])
        for case, changes in CHANGES.items()
        for change, marks in zip(changes, ([], [pytest.mark.thorough]), strict=True)
    ],
)
def test_hooks_are_not_compiled_when_compilation_begins_between_forward_and_backward(ranks, case, change):
    for in_python, compiled in ranks.run(between, 2, CASES[case][0], change, timeout=110):
        torch.testing.assert_close(compiled, in_python, rtol=0, atol=0)
