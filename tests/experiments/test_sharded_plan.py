"""Bytes that a plan computes are the bytes that a step sends."""

import gc
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gradwire
from gradwire.compress import Ranks
from gradwire.compress.simulate import traffic
from gradwire.experiments.ddp_step import Cluster
from gradwire.experiments.optimizer_plan import muon_requests
from gradwire.experiments.sharded_plan import Policy, Shards, plan_sharded
from gradwire.experiments.sharded_step import predicted_shards

from ..hooks.fsdp.given import mesh_of, network, trained
from ..hooks.replicate.given import replicate
from ..torch_versions import muon_of_shards, replicate_of_fsdp

RANKS = 4
PAIRS = [("none", "none"), ("bf16", "bf16"), ("int8", "int4"), ("int4", "int2"), ("int4:send=weights", "onebit")]
PAIRS += [("hosts:ranks=2+int4", "hosts:ranks=2,inside=int8+int4"), ("hosts:ranks=2+none", "none")]
PAIRS += [("int4", "hosts:ranks=2+int4"), ("int4", "hosts:ranks=2+none")]


def parts():
    """The parameters of the modules of `network`."""
    with torch.device("meta"):
        modules = [nn.Linear(7, 33), nn.Linear(33, 20), nn.Linear(20, 5)]
    return [
        {f"{place}.{name}": each for name, each in module.named_parameters()} for place, module in enumerate(modules)
    ]


def counted(rank, world_size, dtype):
    found = []
    for gather, reduce in PAIRS:
        model = network(world_size, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
        handle = gradwire.attach(model, gather=gather, reduce=reduce)
        trained(model, rank, steps=2)
        last = handle.stats().last.traffic
        handle.swap(gather="none", reduce="none")  # what has been sent remains as it was
        found.append((last.payload_bytes, last.sent_bytes, handle.metrics()["ratio"]))
        handle.close()
    return found


def uncompressed(dtype):
    """The bytes that gathers and reductions of a step send in one level."""
    both, ranks = plan_sharded(parts(), "none", "none", world_size=RANKS, policy=Policy(dtype, dtype)), Ranks(RANKS, 0)
    exact = Shards.of(parts(), "none", "none", ranks, Policy(dtype, dtype))
    reductions = [traffic(each, ranks).sent_bytes for layout in exact.layouts for each in exact.reduce(layout)]
    return both.sent_bytes_per_step - sum(reductions), sum(reductions)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_planned_are_bytes_sent(ranks, dtype):
    planned = [plan_sharded(parts(), *pair, world_size=RANKS, policy=Policy(dtype, dtype)) for pair in PAIRS]
    gathers, reductions = uncompressed(dtype)
    for found in ranks.run(counted, RANKS, dtype):
        for pair, plan, bytes_sent in zip(PAIRS, planned, found, strict=True):
            assert bytes_sent[:2] == (plan.payload_bytes_per_step, plan.sent_bytes_per_step), pair
            gather, reduce = (3 if "hosts" in spec else 1 for spec in pair)  # 4 ranks on 2 hosts send a third
            ratio = (gathers / gather + reductions / reduce) / plan.sent_bytes_per_step
            assert bytes_sent[2] == pytest.approx(ratio), pair  # which watch prints
            before = (gathers + reductions) / plan.sent_bytes_per_step  # in one level, whatever the compressor
            assert plan.compression_ratio == pytest.approx(before), pair


def test_state_is_that_of_residuals_and_weights_in_use():
    shapes = ((33, 7), (33, 1), (20, 33), (20, 1), (5, 20), (5, 1))
    layout_bytes = 4 * 4 * sum(-(-rows // 4) * row for rows, row in shapes)
    usual = 2 * 4 * len(parts())  # the change of a step, before and after it
    assert plan_sharded(parts(), "int8", "int4", world_size=4).state_bytes == layout_bytes
    assert plan_sharded(parts(), "int4", "none", world_size=4).state_bytes == 2 * layout_bytes + usual
    half = plan_sharded(parts(), "int4", "none", world_size=4, policy=Policy(torch.bfloat16))
    assert half.state_bytes == 1.5 * layout_bytes + usual
    assert plan_sharded(parts(), "bf16", "bf16", world_size=4).state_bytes == 0
    assert plan_sharded(parts(), "none", "hosts:ranks=2+int4", world_size=4).state_bytes == layout_bytes / 2


def test_without_a_network_a_step_takes_its_computation_and_its_encoding():
    for spec, encodes in (("int8/int4", True), ("none", False)):
        found = predicted_shards(parts(), Cluster(RANKS, 1, 1e18), spec, 1e-3)
        assert (found.encode > 0) == encodes
        assert found.step == pytest.approx(found.computation + found.encode, rel=1e-6)
        assert found.exposed == pytest.approx(found.encode, abs=1e-9)


IN_RINGS = {"all_reduce": 2, "all_gather_into_tensor": RANKS, "reduce_scatter_tensor": 1}


class Collectives(TorchDispatchMode):
    """The bytes that this rank sends in functional collectives, in rings."""

    sent = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).split(".")[1]
        if name in IN_RINGS:
            self.sent += IN_RINGS[name] * args[0].nbytes * (RANKS - 1) / RANKS
        return NotImplemented if DTensor in types else function(*args, **(kwargs or {}))


def muon_sent(rank, world_size, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight, gradient = (distribute_tensor(values, mesh_of(world_size), [Shard(0)]) for _ in range(2))
    parameter = nn.Parameter(weight)
    parameter.grad = gradient
    optimizer = torch.optim.Muon([parameter])
    with Collectives() as collectives:
        optimizer.step()
    return collectives.sent


@muon_of_shards
@pytest.mark.parametrize("shape", [(96, 32), (32, 32), (32, 128)])
def test_the_bytes_planned_for_muon_are_those_that_torchs_muon_sends(ranks, shape):
    planned = sum(each.sent_bytes(RANKS) for each in muon_requests([torch.empty(shape, device="meta")], RANKS))
    for sent in ranks.run(muon_sent, RANKS, shape):
        assert sent == pytest.approx(planned, abs=10)  # but for the norm, of one number


def held():
    """The bytes of all tensors of this process."""
    gc.collect()
    with warnings.catch_warnings():  # of what gc looks at
        warnings.simplefilter("ignore")
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not each.is_meta]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum({each.data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


def bytes_a_parameter(rank, world_size, policies):
    """The most bytes of a training's second step, by torch's replicate and by shards, with some policies."""
    found, mesh = [], mesh_of(world_size)
    for wrapped, options in itertools.product((replicate, fully_shard), policies):
        before = held()
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        elements = sum(each.numel() for each in model.parameters())
        for part in (*model, model):
            wrapped(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(**options))
        optimizer, most = torch.optim.AdamW(model.parameters()), 0
        for _ in range(2):
            loss = model(torch.ones(1, 256)).sum()
            most = max(most, held())
            loss.backward()
            most = max(most, held())
            optimizer.step()
            most = max(most, held())
            optimizer.zero_grad()
        found.append((most - before) / elements)
        del model, part, optimizer, loss
    return found


@replicate_of_fsdp
def test_a_policy_keeps_float32_weights_gradients_and_adamw_also_under_replicate(ranks, planned):
    half = {"param_dtype": torch.bfloat16}
    policies = [{}, half, half | {"reduce_dtype": torch.bfloat16}]
    whole = planned("--model=mlp", "--parallel=fsdp", "--workers=2", "--dtype=bf16", "--optimizer=adamw")
    counted = whole["whole_bytes"] / whole["parameters"]
    for found in ranks.run(bytes_a_parameter, 2, policies):
        assert found[:3] == pytest.approx([counted] * 3, rel=0.02)
        assert found[3:] == pytest.approx([counted / 2] * 3, rel=0.02)
