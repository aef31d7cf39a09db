"""What works on the inside of torch's DDP works on ours, or says that it does not."""

import inspect
import re
import tempfile
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as distributed_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .both import Blocks, assert_all_same, assert_same, batches, error_of, mlp, seeded, train

NEVER_CALLED = {  # parts of methods that ours replaces
    "__init__",
    "_check_and_sync_module_buffers",
    "_check_manual_backward_finalization_supported",
    "_ddp_init_helper",
    "_fire_reducer_autograd_hook",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_sync_final_model",
    "_sync_module_buffers",
}


def test_no_inherited_method_reaches_into_the_cpp_reducer():
    chain = gradwire.DistributedDataParallel.__mro__
    replaced = NEVER_CALLED.union(*map(vars, chain[: chain.index(TorchDDP)]))
    members = {name: getattr(member, "fget", member) for name, member in vars(TorchDDP).items() if name not in replaced}
    functions = {name: inspect.getsource(each) for name, each in members.items() if inspect.isfunction(each)}
    assert [name for name, source in functions.items() if re.search(r"self\.(reducer|logger)\b", source)] == []


def compiled(rank, world_size, ddp, backend, options):
    model = torch.compile(ddp(seeded(Blocks), **options), backend=backend)
    losses = []
    for each in batches(rank, 3, 4, 8):
        model.zero_grad()
        loss = model(each).square().sum()
        loss.backward()
        losses.append(loss.detach())
    return losses, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("eager", {}),
        ("aot_eager", {}),
        ("aot_eager", {"find_unused_parameters": True}),
        ("eager", {"static_graph": True}),
    ],
    ids=str,
)
def test_compiled_models(ranks, backend, options):
    assert_same(ranks, compiled, backend, options, rtol=1e-6, atol=1e-7)


def compiled_inside(rank, world_size, ddp):
    model = ddp(torch.compile(seeded(Blocks), backend="aot_eager"))
    return train(model, batches(rank, 3, 4, 8))


@pytest.mark.conformance
def test_a_compiled_module_inside(ranks):
    assert_same(ranks, compiled_inside, rtol=1e-6, atol=1e-7)


def stepped(rank, inside, options):
    """The parameters after some steps, inside of backward or behind it, and whether gradients are gone."""
    net = seeded(mlp)
    if inside:
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = gradwire.DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for each in batches(rank, 3, 3, 8):
        model(each).square().mean().backward()
        if not inside:
            optimizer.step()
            optimizer.zero_grad()
    gone = all(parameter.grad is None for parameter in model.parameters())
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, gone


def inside_and_behind(rank, world_size, settings):
    return [[stepped(rank, inside, options) for inside in (True, False)] for options in settings]


def test_optimizers_in_backward_step_with_averages(ranks):
    settings = [{}, {"gradient_as_bucket_view": True}, {"compressor": "topk:ratio=0.2"}]
    for answers in ranks.run(inside_and_behind, 2, settings):
        for inside, behind in answers:
            torch.testing.assert_close(inside, behind, rtol=0, atol=0)
            assert inside[1]


def fused(rank, world_size, ddp, case):
    optimizer, in_part = case
    net = seeded(mlp)
    model = ddp(net)
    model._register_fused_optim(optimizer, lr=0.01, **({"optim_params": [next(net.parameters())]} if in_part else {}))
    for each in batches(rank, 4, 3, 8):
        model.zero_grad()
        model(each).square().mean().backward()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_fused_optimizers(ranks):
    whole = [(optimizer, False) for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)]
    assert_all_same(ranks, fused, [*whole, (torch.optim.SGD, True)])


def piped(rank, world_size, ddp, schedule):
    pipe = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    data = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    stage = rank // 2
    model = ddp(seeded(lambda: nn.Linear(4, 4), stage), process_group=data)
    part = PipelineStage(model, stage, 2, torch.device("cpu"), group=pipe)
    runner = schedule(part, 4, loss_fn=nn.functional.mse_loss)
    inputs, target = batches(rank % 2, 2, 8, 4)
    for _ in range(2):
        runner.step(inputs) if stage == 0 else runner.step(target=target)
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.conformance
def test_pipeline_stages(ranks):
    assert_same(ranks, piped, Schedule1F1B, world_size=4)


def piped_twice(rank, world_size):
    ddp = gradwire.DistributedDataParallel
    return piped(rank, world_size, ddp, ScheduleGPipe), piped(rank, world_size, ddp, Schedule1F1B)


@pytest.mark.conformance
def test_pipeline_stages_with_all_forwards_first(ranks):  # torch's reducer fails on an assertion of its own
    for first, second in ranks.run(piped_twice, 4):
        torch.testing.assert_close(first, second)


REFUSED = {
    "finalize_backward": lambda model: model.finalize_backward(),
    "require_manual_backward_finalization": lambda model: setattr(model, "require_manual_backward_finalization", True),
    "_set_sparse_metadata": lambda model: model._set_sparse_metadata({}),
    "reducer._run_allreduce_hook": lambda model: model.reducer._run_allreduce_hook(None),
    "_register_buffer_comm_hook": lambda model: model._register_buffer_comm_hook(None, print),
    "_update_process_group": lambda model: model._update_process_group(dist.group.WORLD),
    "sample rate": lambda model: model._set_ddp_runtime_logging_sample_rate(0),
}


def refused(rank, world_size):
    model = gradwire.DistributedDataParallel(mlp())
    return {name: error_of(call, model) for name, call in REFUSED.items()}


def test_what_is_missing_says_so(ranks):
    for kind, text in ranks.run(refused, 1)[0].values():
        assert kind in ("RuntimeError", "AttributeError", "ValueError")
        assert "gradwire" in text or "should be" in text


def distributed_backward(rank, world_size, inside):
    model = gradwire.DistributedDataParallel(seeded(mlp))
    with tempfile.NamedTemporaryFile() as file:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file.name}", _transports=["uv"])
        rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
        try:
            return error_of(distributed_step, model, batches(rank, 1, 3, 8)[0], inside)
        finally:
            rpc.shutdown(graceful=False)


def distributed_step(model, inputs, inside):
    with distributed_autograd.context() if inside else nullcontext():
        loss = model(inputs).sum()
    with distributed_autograd.context() as context:
        distributed_autograd.backward(context, [loss])


@pytest.mark.conformance
@pytest.mark.parametrize("inside", [True, False])
def test_distributed_autograd_is_refused(ranks, inside):
    kind, text = ranks.run(distributed_backward, 1, inside)[0]
    assert kind == "RuntimeError"
    assert "python_error" in text  # its engine keeps the text to itself
