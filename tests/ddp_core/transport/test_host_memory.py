"""Where ranks of one machine share memory, what of it others see, and that it changes no bit."""

import gc
import os
from importlib import import_module
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

import gradwire
from gradwire.ddp_core import Link, Paced, obstacle
from gradwire.ddp_core.transport import host_memory

from ..nets import ALWAYS, Batch, Net, descend, loss_of

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())


def trained(rank, steps=4, **options):
    """The parameters after some steps, and whether buckets lay in shared memory then."""
    model = gradwire.DistributedDataParallel(Net(ALWAYS[:3]), bucket_cap_mb=0.001, **options)
    for step in range(steps):
        model.zero_grad()
        loss_of(model(Batch.drawn(rank, step))).backward()
        descend(model)
    return [parameter.detach().clone() for parameter in model.parameters()], model.reducer.assignment.shared


def with_and_without(rank, world_size, options):
    with_memory, shared = trained(rank, **options)
    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            patch.setenv(host_memory.SWITCH, "0")
        without, used = trained(rank, **options)
    return shared, used, all(map(torch.equal, with_memory, without))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        {"static_graph": True},
    ],
    ids=str,
)
def test_training_has_the_same_bits_with_shared_memory_as_where_one_rank_does_not_want_it(ranks, options):
    assert ranks.run(with_and_without, 3, options) == [(True, False, True)] * 3


def test_only_the_owner_opens_shared_memory_and_nobody_changes_its_size():
    file, address = host_memory.memory_file(8192)
    try:
        assert os.fstat(file).st_mode & 0o777 == 0o600
        memory = host_memory.mapped(address.split(), 8192)
        for size in (0, 4096, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(file, size)
        seen = numpy.asarray(memory)
        seen[-1] = 7
        assert os.pread(file, 1, 8191) == b"\7"
    finally:
        os.close(file)


def shared_after_steps(rank, world_size):
    """Whether memory is shared before the first step and after some: usually, where ranks do not meet, and after a swap."""
    found = []
    for options, swap in (({}, None), ({"init_sync": False}, None), ({"compressor": "fp16"}, "none")):
        model = gradwire.DistributedDataParallel(Net(ALWAYS[:3]), **options)
        found.append([model.reducer.assignment.shared])
        for step in range(3):
            loss_of(model(Batch.drawn(rank, step))).backward()
            found[-1].append(model.reducer.assignment.shared)
            if swap and step == 0:
                model.compression.swap(swap)
    return found


def test_memory_is_shared_at_once_or_when_ranks_look_at_the_order_of_gradients(ranks):
    usual, apart, swapped = [True] * 4, [False, False, True, True], [False, False, True, True]
    assert ranks.run(shared_after_steps, 2) == [[usual, apart, swapped]] * 2


def fails(*_):
    raise OSError("on purpose")


UNLIKE = {  # how a rank is not like the others: what is another one, and what there is in its place
    "is elsewhere": (host_memory, "machine", lambda: "another"),
    "is not built": (host_memory, "extension", lambda: import_module("gradwire.no_such_extension")),
    "has no memory": (host_memory.os, "posix_fallocate", fails),
    "may not look": (host_memory.os, "open", fails),
    "finds another file": (host_memory.os, "pread", lambda *_: b"something else  "),
    "cannot watch": (host_memory, "Processes", fails),
    "has other buckets": (host_memory, "PAGE", 2 * host_memory.PAGE),
}


def refused(rank, world_size, how):
    """Whether memory is shared where the last rank is not like the others."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            patch.setattr(*UNLIKE[how])
        return trained(rank)[1]


@pytest.mark.parametrize("how", UNLIKE)
def test_all_ranks_do_without_where_one_cannot(ranks, how):
    assert ranks.run(refused, 3, how) == [False] * 3


def with_compression(rank, world_size):
    """Whether memory is shared: of compressed gradients, of several groups, of slow links, and of half precision."""
    found = [trained(rank, compressor="powersgd:rank=1")[1]]
    groups = [dist.new_group(), dist.new_group()]
    found.append(trained(rank, process_group=groups)[1])
    found.append(trained(rank, transport=lambda inner: Paced(inner, Link(1e9)))[1])
    model = gradwire.DistributedDataParallel(torch.nn.Linear(4, 4, dtype=torch.bfloat16))
    for _ in range(2):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    return [*found, model.reducer.assignment.shared]


def test_only_what_is_summed_plainly_over_one_group_is_shared(ranks):
    assert ranks.run(with_compression, 2) == [[False] * 4] * 2


def what_stays_open(rank, world_size):
    """Mappings and files of this process after models with shared memory are gone, beside those before."""

    def opened():
        gc.collect()
        links = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        files = [link for link in links if "memfd:gradwire" in link or "pidfd" in link]
        return Path("/proc/self/maps").read_text().count("memfd:gradwire"), len(files)

    before = opened()
    model = gradwire.DistributedDataParallel(Net(ALWAYS[:3]))
    during = opened()
    model.compression.close()
    del model
    for _ in range(3):
        trained(rank)
    return before, during, opened()


def test_memory_and_files_are_given_back(ranks):
    for (maps, files), during, after in ranks.run(what_stays_open, 2):
        assert during == (maps + 2, files + 1)
        assert after == (maps, files)


def with_moved_gradients(rank, world_size, move):
    """Whether gradients are those of other memory, after somebody had torch move the buckets' memory."""
    gradients = []
    for shared in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(host_memory.SWITCH, shared)
            model = gradwire.DistributedDataParallel(Net(ALWAYS[:3]), gradient_as_bucket_view=True)
        for step in range(4):
            loss_of(model(Batch.drawn(rank, step))).backward()
            if move and step == 1:  # with the buckets that stay
                next(model.parameters()).grad.share_memory_()
        assert model.reducer.assignment.shared == (shared == "1")
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    return all(map(torch.equal, *gradients))


@pytest.mark.parametrize("move", [False, True])
def test_gradients_are_averaged_where_they_lie_now(ranks, move):
    assert ranks.run(with_moved_gradients, 2, move) == [True, True]


def several_ways(rank, world_size):
    """What was shared, and whether parameters are alike: two models of different ranks, accumulation, uneven inputs."""
    pair = dist.new_group([0, 1])
    found, shared = [], []
    for switch in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(host_memory.SWITCH, switch)
            models = [gradwire.DistributedDataParallel(Net(ALWAYS[:3]))]
            if rank < 2:
                models.append(gradwire.DistributedDataParallel(Net(ALWAYS[:2]), process_group=pair))
            for step in range(4):
                for model in models:
                    with model.no_sync():
                        loss_of(model(Batch.drawn(rank, step, 1))).backward()
                    loss_of(model(Batch.drawn(rank, step))).backward()
                    descend(model)
                    model.zero_grad()
            with Join(models[:1]):
                for step in range(2 + rank):
                    loss_of(models[0](Batch.drawn(rank, step))).backward()
                    descend(models[0])
                    models[0].zero_grad()
            shared.append([model.reducer.assignment.shared for model in models])
            found.append([parameter.detach().clone() for model in models for parameter in model.parameters()])
    return shared, all(map(torch.equal, *found))


def test_accumulation_several_models_of_some_ranks_and_uneven_inputs_have_the_same_bits(ranks):
    *both, (shared, same) = ranks.run(several_ways, 3)
    assert both == [([[True, True], [False, False]], True)] * 2
    assert (shared, same) == ([[True], [False]], True)
