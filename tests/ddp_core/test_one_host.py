"""Sums in memory that ranks of one machine share: their bits, their failures, and where they are left out."""

import gc
import mmap
import os
import signal
import threading
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

import gradwire
from gradwire.ddp_core import one_host, pacing
from gradwire.ddp_core.one_host import OneHost, obstacle

from ..ranks import LostRank, RankFailure
from .nets import ALWAYS, Batch, Net, descend, loss_of

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())
NUMELS = [1, 2, 3, 7, 64, 1000, 65536, 65537, 262145, 1_500_007]
HALF_A_SECOND = 0.5
HEADER = 4 * mmap.PAGESIZE


class Rank:
    """One rank of several in this process: its memory, and its sums of float32 buckets."""

    def __init__(self, memories, rank, sizes):
        offsets = [HEADER + sum(sizes[:place]) * 4 for place in range(len(sizes))]
        spans = [(offset, size, 4) for offset, size in zip(offsets, sizes, strict=True)]
        self.sums = extension().SharedSums(memories, rank, spans)
        self.flats = [
            torch.frombuffer(memories[rank], dtype=torch.float32, count=size, offset=offset)
            for offset, size, _ in spans
        ]


def extension():
    return import_module("gradwire.ddp_core._shared")


def memory_of(size):
    file = extension().memory_file("test")
    os.ftruncate(file, size)
    memory = extension().Memory(file, size)
    os.close(file)
    return memory


def ranks_of_one_process(count, sizes):
    memories = [memory_of(HEADER + sum(sizes) * 4) for _ in range(count)]
    return [Rank(memories, rank, sizes) for rank in range(count)]


def test_a_sum_is_there_once_all_have_arrived_and_again_in_every_step():
    group = ranks_of_one_process(3, [70_000])
    for step in range(1, 4):
        for number, rank in enumerate(group):
            rank.flats[0].fill_(number + step)
        for rank in group[:2]:
            rank.sums.arrive(0)
            assert not rank.sums.wait(0, 0.01)
            assert not rank.sums.is_there(0)
        assert group[0].sums.missing(0) == [2]
        group[2].sums.arrive(0)
        for rank in group:
            assert rank.sums.wait(0, 5.0)
            assert rank.sums.missing(0) == []
            assert time.perf_counter() - 5.0 < rank.sums.since(0) <= time.perf_counter()
            assert torch.equal(rank.flats[0], torch.full((70_000,), 3.0 + 3 * step))


def test_buckets_are_independent_and_what_lies_beside_them_stays():
    first, second = ranks_of_one_process(2, [10, 6, 5])
    for rank in (first, second):
        for flat in rank.flats:
            flat.fill_(1.0)
        rank.sums.arrive(1)
    assert first.sums.wait(1, 5.0)
    assert [flat.tolist() for flat in second.flats] == [[1.0] * 10, [2.0] * 6, [1.0] * 5]


def hurried(rank, number, steps, wrong):
    """Sums of all buckets again and again, in an order and after pauses that other ranks do not have."""
    chance = Random(number)
    for step in range(steps):
        for flat in rank.flats:
            flat.fill_(step + number)
        order = chance.sample(range(len(rank.flats)), len(rank.flats))
        for place in order:
            time.sleep(chance.choice((0.0, 0.0, 0.001)))
            rank.sums.arrive(place)
        for place in order:
            if not rank.sums.wait(place, 20.0) or rank.flats[place].ne(4 * step + 6).any():
                wrong.append((number, step, place))
                return


def test_sums_come_out_whoever_is_first():
    group, wrong = ranks_of_one_process(4, [1, 100_000, 65_536, 300_001, 17]), []
    threads = [threading.Thread(target=hurried, args=(rank, n, 100, wrong)) for n, rank in enumerate(group)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_smallest_numbers_are_kept_whoever_adds_up():
    group = ranks_of_one_process(2, [300_000])
    for rank in group:
        rank.flats[0].copy_(torch.full((300_000,), 3, dtype=torch.int32).view(torch.float32))
    torch.set_flush_denormal(True)
    try:
        for rank in group:
            rank.sums.arrive(0)
        assert all(rank.sums.wait(0, 5.0) for rank in group)
    finally:
        torch.set_flush_denormal(False)
    assert group[0].flats[0].view(torch.int32).unique().tolist() == [6]


def test_who_gives_up_ends_the_wait_of_the_others_and_no_sum_begins_any_more():
    first, second = ranks_of_one_process(2, [10])
    first.sums.arrive(0)
    threading.Timer(0.1, second.sums.give_up).start()
    began = time.monotonic()
    assert not first.sums.wait(0, 20.0)
    assert time.monotonic() - began < 10
    assert first.sums.given_up() == 1
    second.sums.arrive(0)
    assert not second.sums.wait(0, 0.1)
    assert second.flats[0].tolist() == [0.0] * 10


def test_a_rank_that_is_gone_has_given_up():
    first, second = ranks_of_one_process(2, [10])
    first.sums.arrive(0)
    del second
    assert not first.sums.wait(0, 20.0)
    assert first.sums.given_up() == 1


def numbers(rank, step, numel, dtype):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(numel, generator=generator, dtype=dtype) * 10 ** torch.randn(numel, generator=generator)


def sums_of_both_kinds(rank, world_size, dtype):
    """Of some sizes and steps: whether a shared sum has the bits of Gloo's."""
    parameters = [[torch.empty(numel, dtype=dtype)] for numel in NUMELS]
    shared = OneHost([dist.group.WORLD], torch.device("cpu")).buffers(parameters)
    same = []
    for step in range(2):
        started = []
        for buffer in shared:
            buffer.flat.copy_(numbers(rank, step, buffer.flat.numel(), dtype))
            started.append(buffer.sum())
        for buffer, work in zip(shared, started, strict=True):
            work.wait(timedelta(seconds=20))
            expected = numbers(rank, step, buffer.flat.numel(), dtype)
            dist.all_reduce(expected)
            same.append(torch.equal(buffer.flat, expected))
    return same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_sums_have_the_bits_of_gloo_s_ring(ranks, world_size, dtype):
    assert ranks.run(sums_of_both_kinds, world_size, dtype) == [[True] * 2 * len(NUMELS)] * world_size


def trained(rank, steps=4, **options):
    """The parameters after some steps, and whether buckets lay in shared memory then."""
    model = gradwire.DistributedDataParallel(Net(ALWAYS[:3]), bucket_cap_mb=0.001, **options)
    for step in range(steps):
        model.zero_grad()
        loss_of(model(Batch.drawn(rank, step))).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
    shared = model.reducer.plan.shared
    model.compression.close()
    return [parameter.detach().clone() for parameter in model.parameters()], shared


def with_and_without(rank, world_size, options):
    with_memory, shared = trained(rank, **options)
    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            patch.setenv(one_host.SWITCH, "0")
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


def shared_after_steps(rank, world_size):
    """Whether memory is shared before the first step and after some: usually, where ranks do not meet, and after a swap."""
    found = []
    for options, swap in (({}, None), ({"init_sync": False}, None), ({"compressor": "fp16"}, "none")):
        model = gradwire.DistributedDataParallel(Net(ALWAYS[:3]), **options)
        found.append([model.reducer.plan.shared])
        for step in range(3):
            loss_of(model(Batch.drawn(rank, step))).backward()
            found[-1].append(model.reducer.plan.shared)
            if swap and step == 0:
                model.compression.swap(swap)
        model.compression.close()
    return found


def test_memory_is_shared_at_once_or_when_ranks_look_at_the_order_of_gradients(ranks):
    usual, apart, swapped = [True] * 4, [False, False, True, True], [False, False, True, True]
    assert ranks.run(shared_after_steps, 2) == [[usual, apart, swapped]] * 2


def refused(rank, world_size, how):
    """Whether memory is shared where the last rank is not like the others."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            how(patch)
        return trained(rank)[1]


def is_elsewhere(patch):
    patch.setattr(one_host, "machine", lambda: "another")


def is_not_built(patch):
    patch.setattr(one_host, "extension", lambda: import_module("gradwire.no_such_extension"))


def fails(*_):
    raise OSError("on purpose")


def has_no_memory(patch):
    patch.setattr(one_host.os, "posix_fallocate", fails)


def may_not_look(patch):
    patch.setattr(one_host.os, "open", fails)


def finds_another_file(patch):
    patch.setattr(one_host.os, "pread", lambda *_: b"something else  ")


def cannot_watch(patch):
    patch.setattr(one_host, "Ranks", fails)


def has_other_buckets(patch):
    patch.setattr(one_host, "PAGE", 2 * one_host.PAGE)


@pytest.mark.parametrize(
    "how",
    [is_elsewhere, is_not_built, has_no_memory, may_not_look, finds_another_file, cannot_watch, has_other_buckets],
)
def test_all_ranks_do_without_where_one_cannot(ranks, how):
    assert ranks.run(refused, 3, how) == [False] * 3


def with_compression(rank, world_size):
    """Whether memory is shared: of compressed gradients, of several groups, of slow links, and of half precision."""
    found = [trained(rank, compressor="powersgd:rank=1")[1]]
    groups = [dist.new_group(), dist.new_group()]
    found.append(trained(rank, process_group=groups)[1])
    with pacing(lambda work, _: work):
        found.append(trained(rank)[1])
    model = gradwire.DistributedDataParallel(torch.nn.Linear(4, 4, dtype=torch.bfloat16))
    for _ in range(2):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    model.compression.close()
    return [*found, model.reducer.plan.shared]


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
    model = model_of(rank)
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


def model_of(rank, **options):
    model = gradwire.DistributedDataParallel(Net(ALWAYS[:3]), bucket_cap_mb=0.001, **options)
    for step in range(2):
        loss_of(model(Batch.drawn(rank, step))).backward()
    assert model.reducer.plan.shared
    return model


def with_a_fork(rank, world_size):
    """A child that has copies of all, and threads of its own, and ends, changes nothing."""
    model = model_of(rank)
    if (child := os.fork()) == 0:
        for _ in range(3):
            thread = threading.Thread(target=gc.collect)
            thread.start()
            thread.join()
        model.compression.close()
        del model
        gc.collect()
        os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    loss_of(model(Batch.drawn(rank, 2))).backward()
    model.compression.close()
    return code


def test_a_forked_child_ends_without_touching_its_parent_s_sums(ranks):
    assert ranks.run(with_a_fork, 2) == [7, 7]


def with_moved_gradients(rank, world_size, move):
    """Whether gradients are those of other memory, after somebody had torch move the buckets' memory."""
    gradients = []
    for shared in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(one_host.SWITCH, shared)
            model = gradwire.DistributedDataParallel(Net(ALWAYS[:3]), gradient_as_bucket_view=True)
        for step in range(4):
            loss_of(model(Batch.drawn(rank, step))).backward()
            if move and step == 1:  # with the buckets that stay
                next(model.parameters()).grad.share_memory_()
        assert model.reducer.plan.shared == (shared == "1")
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.compression.close()
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
            patch.setenv(one_host.SWITCH, switch)
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
            shared.append([model.reducer.plan.shared for model in models])
            found.append([parameter.detach().clone() for model in models for parameter in model.parameters()])
            for model in models:
                model.compression.close()
    return shared, all(map(torch.equal, *found))


def test_accumulation_several_models_of_some_ranks_and_uneven_inputs_have_the_same_bits(ranks):
    *both, (shared, same) = ranks.run(several_ways, 3)
    assert both == [([[True, True], [False, False]], True)] * 2
    assert (shared, same) == ([[True], [False]], True)


def error_of_the_next_step(rank, model):
    began = time.monotonic()
    try:
        loss_of(model(Batch.drawn(rank, 2))).backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def beside_a_death(rank, world_size):
    model = model_of(rank)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    message, seconds = error_of_the_next_step(rank, model)
    raise RuntimeError(f"{seconds:.1f} s: {message}")


def test_a_rank_that_is_killed_is_named_within_seconds(ranks):
    first, dead, last = ranks.run(beside_a_death, 3, expect_errors=True)
    assert isinstance(dead, LostRank)
    for failure in (first, last):
        assert isinstance(failure, RankFailure)
        seconds, message = failure.message.split(" s: ")
        assert float(seconds) < 15
        assert "rank 1 has ended" in message or "has given up" in message
        assert message.startswith("bucket 0 ")
    assert any("rank 1 has ended" in failure.message for failure in (first, last))


def without_an_answer(rank, world_size):
    model = model_of(rank, timeout=timedelta(seconds=1))
    message, _ = error_of_the_next_step(rank, model) if rank == 0 else ("", 0.0)
    dist.barrier()
    return message


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(ranks):
    message, nothing = ranks.run(without_an_answer, 2)
    assert "timed out after 0:00:01: of ranks [1] gradients are missing" in message
    assert not nothing


def beside_a_failure(rank, world_size):
    """What the others raise when rank 0's time is over, which have more of it."""
    model = model_of(rank, timeout=timedelta(seconds=1 if rank == 0 else 60))
    message, seconds = error_of_the_next_step(rank, model) if rank < 2 else ("", 0.0)
    dist.barrier()
    return message, seconds


def test_a_rank_that_gives_up_has_the_others_raise(ranks):
    (own, _), (other, seconds), _ = ranks.run(beside_a_failure, 3)
    assert "timed out" in own
    assert "rank 0 has given up" in other
    assert seconds < 30


def beside_one_that_closes(rank, world_size):
    """What rank 0 raises, and when, where rank 1 ends its compression with nothing under way."""
    model = model_of(rank, timeout=timedelta(seconds=60))
    if rank == 1:
        model.compression.close()
    message, seconds = error_of_the_next_step(rank, model) if rank == 0 else ("", 0.0)
    dist.barrier()
    return message, seconds


def test_a_rank_that_closes_has_the_others_raise(ranks):
    (message, seconds), _ = ranks.run(beside_one_that_closes, 2)
    assert "rank 1 has given up" in message
    assert seconds < 30


def interrupted(rank, world_size):
    """Ctrl-C while rank 0 waits for a sum."""
    model = model_of(rank, timeout=timedelta(seconds=60))
    said = ""
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(HALF_A_SECOND, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            loss_of(model(Batch.drawn(rank, 2))).backward()
        except (KeyboardInterrupt, RuntimeError) as error:
            said = type(error).__name__
    dist.barrier()
    return said


def test_a_wait_can_be_interrupted(ranks):
    assert ranks.run(interrupted, 2, timeout=30) == ["KeyboardInterrupt", ""]
