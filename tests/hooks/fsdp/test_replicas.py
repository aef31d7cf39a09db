"""Hybrid sharding: any compressor among replicas, in place of torch's all-reduce."""

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import gradwire
from gradwire.hooks.fsdp.replicas import ReplicaMean

from ... import late
from ...ddp_core.errors import message_of
from ...late import Late
from ...torch_versions import fsdp_sums
from ..given import same
from .given import given_model, gradients, mean_gradients, network, trained

LIMIT = timedelta(seconds=30)


def mesh_of(replicas, shards):
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def alone(rank, world_size):
    """{case: parameters by torch, and by ours}, on a mesh in which each rank has the model as a whole, as torchtitan's."""
    answers = {}
    for divisor in (None, 1.0):
        for arguments in (REPLICAS, REPLICAS | SHARDS, SHARDS):
            for ours in (False, True):
                model = network(2, mesh_of(2, 1))
                for module in filter(lambda each: divisor and isinstance(each, FSDPModule), model.modules()):
                    module.set_gradient_divide_factor(divisor)
                handle = gradwire.attach(model, **arguments) if ours else None
                answers.setdefault(f"{arguments}, {divisor}", []).append(trained(model, rank))
                if ours:
                    assert arguments == SHARDS or handle.replicas.metrics()["steps"] == 4
                    handle.state_dict()
                    handle.close()
    return answers


REPLICAS, SHARDS = {"replicas": "none"}, {"gather": "int8", "reduce": "int8"}


@fsdp_sums
def test_where_no_rank_shares_its_parameters_torchs_divisor_is_that_of_sums_over_replicas(ranks):
    for answers in ranks.run(alone, 2):
        for case, (theirs, ours) in answers.items():
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, msg=case)


def reported(rank, world_size, shape):
    """What a handle says that communicates between replicas only: its repr, figures, theirs of its replicas, reports."""
    model, reports = network(shape[1], mesh_of(*shape)), []
    handle = gradwire.attach(model, replicas="int8")
    handle.watch(every=1, to=lambda metrics, step: reports.append((step, metrics)))
    trained(model, rank)
    found = repr(handle), handle.metrics(), handle.replicas.metrics(), handle.stats(), handle.replicas.stats(), reports
    handle.close()
    return found


@fsdp_sums
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=str)
def test_a_handle_of_replicas_alone_reports_their_steps_and_bytes(ranks, shape):
    for rank, found in enumerate(ranks.run(reported, torch.Size(shape).numel(), shape)):
        said, metrics, of_replicas, stats, stats_of_replicas, reports = found
        assert said.startswith(f"<ShardHandle: replicas int8, rank {rank // shape[1]} of 2, 4 steps, 4 of them here, ")
        assert metrics == of_replicas
        assert stats == stats_of_replicas
        assert metrics["steps"] == 4
        assert metrics["sent_bytes"] > 0
        assert [step for step, _ in reports] == ([1, 2, 3] if rank == 0 else [])
        assert all(each["sent_bytes"] > 0 for _, each in reports)


def reported_of_both(rank, world_size):
    """What a handle of shards and replicas says: its repr and figures, those of its replicas, and the last report's line."""
    model, lines = network(2, mesh_of(2, 2)), []
    handle = gradwire.attach(model, gather="int8", reduce="int8", replicas="bf16")
    watch = handle.watch(every=1)
    watch._sinks = [lambda report: lines.append(str(report))] if rank == 0 else []
    trained(model, rank)
    found = repr(handle), handle.metrics(), handle.replicas.metrics(), lines[-1:]
    handle.close()
    return found


def test_a_handle_of_shards_and_replicas_reports_the_bytes_of_both(ranks):
    for said, metrics, of_replicas, lines in ranks.run(reported_of_both, 4):
        ratio = f"{metrics['ratio']:.1f}x fewer bytes"
        assert said.endswith(f", {ratio} in the last, 2.0x between replicas>")
        for name in ("sent_bytes", "total_sent_bytes", "ratio", "link_bytes_per_second"):
            assert metrics[f"replica_{name}"] == of_replicas[name] != metrics[name]
        for line in lines:
            assert f" among shards, {ratio}, at " in line
            assert " between replicas, 2.0x fewer bytes, at " in line


def swapped(rank, world_size):
    """True if a swap of replicas to `none` trains as `none` does; the compressor in use after a refusal; what it says."""
    models = [network(2, mesh_of(2, 1)) for _ in range(2)]
    handles = [gradwire.attach(model, replicas=each) for model, each in zip(models, ("none", "int8"), strict=True)]
    handles[1].swap(replicas="none")
    equal = same(*(trained(model, rank) for model in models))
    said = message_of(handles[1].swap, reduce="int8", replicas="int4")
    return equal, repr(handles[1]), said


@fsdp_sums
def test_a_swap_takes_the_compressor_of_replicas_alone(ranks):
    for equal, after, said in ranks.run(swapped, 2):
        assert equal
        assert after.startswith("<ShardHandle: replicas none, ")
        assert "gradwire communicates between replicas only here, got gather=None and reduce='int8'" in said


def swapped_together(rank, world_size):
    """Handles after a swap that is refused, after one that changes all, and without replicas; what that refusal says."""
    model = network(2, mesh_of(2, 2))
    handle = gradwire.attach(model, gather="int8", reduce="int8", replicas="int8")
    trained(model, rank, steps=1)
    assert "unknown" in message_of(handle.swap, gather="bf16", replicas="unknown")
    found = [repr(handle), repr(handle.replicas)]
    handle.swap(gather="bf16", reduce="bf16", replicas="none")
    trained(model, rank, steps=1, first=1)
    found += [repr(handle), repr(handle.replicas)]
    handle.close()
    assert "the handle is closed" in message_of(handle.swap, replicas="int8")
    alone = gradwire.attach(network(4), gather="int8", reduce="int8")
    said = message_of(alone.swap, gather="none", replicas="int8")
    found.append(repr(alone))
    alone.close()
    return found, said


def test_one_swap_changes_the_compressors_of_shards_and_replicas_or_none(ranks):
    shown = (
        "<ShardHandle: gather int8, reduce int8, replicas int8, ",
        "<Handle: int8, ",
        "<ShardHandle: gather bf16, reduce bf16, replicas none, ",
        "<Handle: none, ",
        "<ShardHandle: gather int8, reduce int8, ",
    )
    for found, no_replicas in ranks.run(swapped_together, 4):
        assert all(map(str.startswith, found, shown)), found
        assert "does not communicate between replicas here, got replicas='int8': leave it out" in no_replicas


def divided_after_sums(rank, world_size, shape, dtype, forced):
    """The most by which mean gradients are off, where torch divides while averages are on their way, if it does not wait."""
    model = given_model(mesh=mesh_of(*shape)).to(dtype)
    for module in filter(lambda each: isinstance(each, FSDPModule), model.modules()):
        module.set_force_sum_reduction_for_comms(forced)
    handle = gradwire.attach(model, replicas="none", transport=lambda inner: Late(inner, LIMIT))
    average = ReplicaMean.__call__

    def begun(mean, reduce_output):
        average(mean, reduce_output)
        time.sleep(0.075)  # the all-reduce has begun then, and has not ended

    with mock.patch.object(late, "SECONDS", 0.05), mock.patch.object(ReplicaMean, "__call__", begun):
        came = mean_gradients(model, gradients(rank, 0))
    handle.close()
    given = [sum(every) / world_size for parts in of_all(world_size, 0) for every in zip(*parts, strict=True)]
    return max(float((mean - each).abs().max()) for mean, each in zip(came.values(), given, strict=True))


@fsdp_sums
@pytest.mark.parametrize(
    ("shape", "dtype", "forced"), [((2, 2), torch.float32, True), ((2, 3), torch.float64, False)], ids=str
)
def test_averages_that_torch_divides_are_there_before_it_does(ranks, shape, dtype, forced):
    assert max(ranks.run(divided_after_sums, torch.Size(shape).numel(), shape, dtype, forced, timeout=200)) < 1e-6


def accumulated(rank, world_size):
    """Gradients of three backwards of which the last averages over replicas, by torch and by ours; rounds of ours."""
    answers = []
    for ours in (False, True):
        model = given_model(mesh=mesh_of(2, 2))
        handle = gradwire.attach(model, replicas="none") if ours else None
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            model(gradients(rank, step)).backward()
        answers.append({name: each.grad.full_tensor().clone() for name, each in model.named_parameters()})
    steps = handle.replicas.metrics()["steps"]
    handle.close()
    return *answers, steps


def test_replicas_wait_for_the_last_backward_of_an_accumulation(ranks):
    for theirs, ours, steps in ranks.run(accumulated, 4):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert steps == 1


def of_all(world_size, step):
    """By part of the model, the gradients of each rank."""
    return zip(*(gradients(rank, step) for rank in range(world_size)), strict=True)


def held_around_a_refused_rescaling(rank, world_size):
    """What shards hold back before and after replicas have refused to be rescaled."""
    model = given_model(mesh=mesh_of(2, 2))
    handle = gradwire.attach(model, reduce="int4", replicas="topk:ratio=0.3")
    mean_gradients(model, gradients(rank, 0))
    handle.load_state_dict(handle.state_dict())
    (before,) = handle.state_dict().values()
    with pytest.raises(RuntimeError, match="after the next backward"):
        handle.rescale(2.0)
    (after,) = handle.state_dict().values()
    handle.close()
    return [[fields["residual"] for fields in each["parameters"].values()] for each in (before, after)]


def test_a_rescaling_that_is_refused_changes_nothing(ranks):
    for before, after in ranks.run(held_around_a_refused_rescaling, 4):
        assert all(map(torch.equal, before, after))


def followed_twice(rank, world_size):
    """What each handle of hybrid sharding says once the other one follows a scaler."""
    found = []
    for first in (0, 1):
        model = given_model(mesh=mesh_of(1, 1))
        handle = gradwire.attach(model, reduce="none", replicas="int8")
        both = [handle, handle.replicas]
        both[first].follow(torch.amp.GradScaler("cpu"))
        found.append(message_of(both[1 - first].follow, torch.amp.GradScaler("cpu")))
        both[first].follow(torch.amp.GradScaler("cpu"))  # another scaler in place of its own
        handle.close()
    return found


def test_one_handle_of_hybrid_sharding_follows_a_scaler_for_both(ranks):
    assert all("call follow() of one alone" in said for said in ranks.run(followed_twice, 1)[0])


def around_a_backward_without_replicas(rank, world_size):
    """What replicas hold back before and after a backward that overflows, among shards alone."""
    model = given_model(mesh=mesh_of(2, 2))
    handle = gradwire.attach(model, reduce="int4", replicas="topk:ratio=0.3", undo=True)
    for step in range(2):
        mean_gradients(model, gradients(rank, step))
    before = handle.replicas.state_dict()
    model.set_requires_all_reduce(False)
    infinite = gradients(rank, 2)
    infinite[0][0][0, 0] = torch.inf
    model(infinite).backward()
    after = handle.replicas.state_dict()
    handle.close()
    return before, after


def test_a_backward_among_shards_that_overflows_leaves_what_replicas_hold_back(ranks):
    for before, after in ranks.run(around_a_backward_without_replicas, 4):
        assert same(before, after)
