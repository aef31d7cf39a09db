"""What a handle of shards says of itself, and what is said once of a model, on whatever number of ranks."""

import logging
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradwire

from ...ddp_core.errors import logged, message_of
from .given import mesh_of, network, trained


def muon_of(model):
    matrices = [each for each in model.parameters() if each.ndim == 2]
    return [torch.optim.Muon(matrices), torch.optim.AdamW(each for each in model.parameters() if each.ndim != 2)]


def attached(mesh, made, **compressors):
    """The warnings of an attach, with the optimizers that `made` makes."""
    model = network(0, mesh)
    with logged(level=logging.WARNING) as lines:
        gradwire.attach(model, **compressors, optimizer=None if made is None else made(model)).close()
    return lines


def reported(mesh, folder):
    """Report a loss to `gradwire try`."""
    handle = gradwire.attach(network(0, mesh), replicas="int8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADWIRE_TRY_FOLDER", folder)
        patch.setenv("GRADWIRE_TRY_STEPS", "9")
        gradwire.report_loss(1.0, handle)
    handle.close()


def of_hybrid(rank, world_size, folder):
    """Warnings on a mesh of two shards and two replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    every = {"gather": "int8", "reduce": "int4", "replicas": "int4"}
    foreign = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    reported(mesh, folder)
    return [
        attached(mesh, None, **every),
        attached(mesh, lambda model: foreign, **every),
        attached(mesh, muon_of, **every),
        attached(mesh, None, replicas="int8"),
        attached(mesh, None, **(every | {"replicas": None})),
        attached(mesh, None, gather="hosts+int8", reduce="hosts+int8", replicas="none"),
    ]


def test_of_a_hybrid_model_the_first_rank_alone_warns_once_and_all_report_losses(ranks, tmp_path):
    first, *others = ranks.run(of_hybrid, 4, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 4
    assert others == [[[]] * 6] * 3
    assert [len(each) for each in first] == [1, 1, 1, 0, 2, 1]
    unknown, foreign, muon, _, unasked, one_host = first
    assert "int4 keeps its default error feedback" in unknown[0]
    assert "updates none of the model's 6 trainable parameters" in foreign[0]
    assert "sends 3 sharded matrices between the ranks (some also between replicas), several times and unc" in muon[0]
    assert "gradients between replicas of the FSDP2 model travel uncompressed: pass replicas='int8'" in unasked[1]
    assert "gradients of the FSDP2 model travel uncompressed: reduce='hosts+int8' compresses" in one_host[0]
    assert "Pass reduce='int8' to gradwire.attach, or 'none'" in one_host[0]


def of_shards(rank, world_size):
    mesh, both = mesh_of(world_size), {"gather": "int8", "reduce": "int8"}
    alone = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicas", "shards"))
    return [
        attached(mesh, muon_of, **both),
        attached(mesh, lambda model: muon_of(model)[1], **both),
        attached(alone, muon_of, replicas="int8"),
        attached(mesh, None),
        attached(mesh, None, reduce="int8"),
        attached(mesh, None, gather="none", reduce="none"),
    ]


def test_what_travels_uncompressed_unasked_is_said(ranks):
    first, others = ranks.run(of_shards, 2)
    assert others == [[]] * 6
    assert [len(each) for each in first] == [1, 0, 0, 1, 1, 0]
    assert "gradwire neither compresses nor counts these bytes" in first[0][0]
    assert "weights and gradients of the FSDP2 model travel uncompressed: pass gather='int8', reduce" in first[3][0]
    assert "weights of the FSDP2 model travel uncompressed: pass gather='int8' to gradwire.attach" in first[4][0]


def described(rank, world_size):
    """A handle in words, before and after a swap and steps; and what a swap by DDP's signature raises."""
    model = network(world_size)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = gradwire.attach(model, gather="int4:send=weights", reduce="hosts:ranks=1+int4", optimizer=optimizer)
    texts = [repr(handle)]
    handle.swap(gather="int8", reduce={"name": "int4", "block": 64})
    trained(model, rank, 2)
    return [*texts, repr(handle), message_of(handle.swap, "int4")]


def test_a_handle_names_the_compressors_as_they_are_written(ranks):
    (before, after, refused), _ = ranks.run(described, 2)
    assert before.startswith(
        "<ShardHandle: gather int4:send=weights, reduce hosts:ranks=1+int4:error_feedback=false, rank 0 of 2, 0 steps"
    )
    assert after.startswith(
        "<ShardHandle: gather int8, reduce int4:block=64,error_feedback=false, rank 0 of 2, 2 steps"
    )
    assert refused.endswith("got 'int4': name them, as in swap(gather='int8', reduce='int8')")
    assert "FSDP2 has two compressors" in refused


def in_vain(rank, world_size):
    """Lines about bytes that leave a host, in training with compressors that are swapped, where two ranks share a host."""
    model = network(0, mesh_of(world_size))
    handle = gradwire.attach(model, gather="int8", reduce="int8")
    with logged() as lines, mock.patch.dict("os.environ", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2"):
        for following in ({"reduce": "int4"}, {"reduce": "int8"}, {"gather": "hosts:ranks=2+int8"}):
            trained(model, rank, steps=1)
            handle.swap(**following)
    handle.close()
    return [line.rpartition(" sends ")[0].rpartition(" ")[2] for line in lines if "network card" in line]


def test_the_first_rank_says_once_what_shards_send_in_vain(ranks):
    first, *others = ranks.run(in_vain, 4)
    assert first == ["gather=hosts+int8", "reduce=hosts+int8", "reduce=hosts+int4"]
    assert others == [[], [], []]
