"""torch's communication hooks on our class give what they give on torch's, and ours on both the same."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

import gradwire

from ..torch_versions import quantization_hooks as quantizes
from .both import assert_all_same, assert_same, batches, both, error_of, mlp, seeded, train

STEPS = 5
QUANTIZED, INEXACT = "quantization per tensor", "quantization per channel"


def power_sgd(ddp, **options):
    state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=2, **options)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def post_local_sgd(ddp):
    subgroup, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=3)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def then(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


def gradients_in_turn(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        assert gradient.shape == parameter.shape
        dist.all_reduce(gradient)
    bucket.set_buffer(bucket.buffer() / dist.get_world_size())
    state.append((bucket.index(), bucket.is_last(), bucket.buffer().numel()))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


HOOKS = {
    "allreduce": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    "allreduce in a group": lambda ddp: ddp.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook),
    "fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "fp16 around allreduce": lambda ddp: ddp.register_comm_hook(
        None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "built-in allreduce": lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    "built-in fp16": lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    "PowerSGD": lambda ddp: power_sgd(ddp, matrix_approximation_rank=2),
    "PowerSGD, cold start": lambda ddp: power_sgd(ddp, warm_start=False, use_error_feedback=False),
    QUANTIZED: lambda ddp: ddp.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook),
    INEXACT: lambda ddp: ddp.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_perchannel_hook),
    "post-local SGD": post_local_sgd,
    "then()": lambda ddp: ddp.register_comm_hook(None, then),
    "parts of the bucket": lambda ddp: ddp.register_comm_hook([], gradients_in_turn),
    "gradwire.attach": lambda ddp: gradwire.attach(ddp, "powersgd:rank=2"),
    "gradwire.comm_hook": lambda ddp: ddp.register_comm_hook(None, gradwire.comm_hooks.bf16),
}


def steps(rank, world_size, ddp, hook):
    model = ddp(seeded(mlp))
    HOOKS[hook](model)
    return train(model, batches(rank, STEPS, 3, 8))


def test_a_hook_gives_bit_for_bit_what_it_gives_on_torchs_ddp(ranks):
    assert_all_same(ranks, steps, [hook for hook in HOOKS if hook not in (QUANTIZED, INEXACT)])


@quantizes
def test_so_does_one_that_quantizes(ranks):
    assert_same(ranks, steps, QUANTIZED)


@quantizes
def test_but_for_one_whose_error_depends_on_the_order_in_a_bucket(ranks):  # torch's first one is in the model's order
    assert_same(ranks, steps, INEXACT, atol=1e-3)


def steps_with_views(rank, world_size, ddp, hook):
    model = ddp(seeded(mlp), gradient_as_bucket_view=True, bucket_cap_mb=None if hook == "PowerSGD" else 0.01)
    HOOKS[hook](model)
    return train(model, batches(rank, STEPS, 3, 8))


def test_so_it_does_where_gradients_are_views_of_small_buckets(ranks):
    assert_all_same(ranks, steps_with_views, ["allreduce", "PowerSGD", "then()"])


def refusals(rank, world_size, ddp):
    model = ddp(nn.Linear(2, 2))

    def wrong_bucket(state, bucket: int) -> torch.futures.Future[torch.Tensor]: ...

    def wrong_result(state, bucket: dist.GradBucket) -> int: ...

    wrong = [error_of(model.register_comm_hook, None, hook) for hook in ({}, wrong_bucket, wrong_result)]
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    twice = error_of(model.register_comm_hook, None, default_hooks.allreduce_hook)
    return wrong, twice[0], twice[1][:72]


def test_wrong_hooks_and_second_ones_are_refused_alike(ranks):
    theirs, ours = both(ranks, refusals)
    assert ours == theirs
    assert "can only be called once" in ours[0][2]


class Scaled:
    """A callable without a name, as torch's DDP refuses it."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, state, bucket):
        work = dist.all_reduce(bucket.buffer().mul_(self.factor), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def with_an_object(rank, world_size):
    plain = gradwire.DistributedDataParallel(seeded(mlp))
    hooked = gradwire.DistributedDataParallel(seeded(mlp))
    hooked.register_comm_hook(None, Scaled(1 / world_size))
    inputs = batches(rank, 3, 3, 8)
    return train(plain, inputs), train(hooked, inputs)


def test_any_callable_is_a_hook(ranks):
    for plain, hooked in ranks.run(with_an_object, 2):
        torch.testing.assert_close(plain, hooked)


def bfloat16(rank, world_size):
    model = gradwire.DistributedDataParallel(seeded(mlp))
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return train(model, batches(rank, 3, 3, 8))


def test_torchs_bf16_hook_works_without_a_gpu(ranks):
    first, second = ranks.run(bfloat16, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def compressed(rank, world_size):
    model = gradwire.DistributedDataParallel(nn.Linear(2, 2), compressor="bf16")
    return error_of(model.register_comm_hook, None, default_hooks.allreduce_hook)


def test_a_compressor_and_a_hook_exclude_each_other(ranks):
    assert all("compressor='none'" in text for _, text in ranks.run(compressed, 2))
