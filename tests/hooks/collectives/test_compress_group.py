"""Collectives of a loop's own: compressed from a size on within int8's bound, all others as torch has them."""

import gc
import os
import random
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import FullyShardedDataParallel

import gradwire
from gradwire.compress.protocol.requests import AllReduce
from gradwire.ddp_core.transport.process_group import over

from ...ddp_core.errors import logged
from ...ranks import LostRank
from ...torch_versions import operations_in_cpp

LIMIT = 4096  # bytes, of these tests
SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
FORMS = ("contiguous", "view", "transposed", "strided")


def bound(inputs, largest, dtype):
    """The error of a sum of so many ranks by int8: both roundings are at most half a scale, a 127th of the largest."""
    first = largest / 254
    total = inputs * (first + (largest + first) / 254)
    rounding = 0.0 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps * inputs * (largest + first)
    return total * 1.001 + rounding


def laid(values, form):
    """A tensor with these flat values, of another form in memory; two axes where there is no other way."""
    count = values.numel()
    if form == "view":
        whole = torch.zeros(count + 7, dtype=values.dtype)
        whole[3 : 3 + count] = values
        return whole[3 : 3 + count]
    if form == "transposed" and count % 4 == 0:
        return values.view(4, -1).t().contiguous().t()
    if form == "strided":
        whole = torch.zeros(2 * count, dtype=values.dtype)
        whole[::2] = values
        return whole[::2]
    return values.clone()


def drawn(generator, members, count, dtype):
    """Every member's numbers."""
    if dtype == torch.int64:
        return [torch.randint(-99, 99, (count,), generator=generator) for _ in range(members)]
    return [torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) for _ in range(members)]


def one_call(dice, generator, group, twin):
    """Begin a call on a group. Return its work, and what checks the result once it is there."""
    me, members = group.rank(), group.size()
    kind = dice.choice(["all_reduce", "all_reduce", "reduce_scatter", "reduce_scatter_list", "all_gather"])
    dtype, op = dice.choice(DTYPES), dice.choice([SUM, SUM, AVG, MAX])
    width = torch.empty(0, dtype=dtype).element_size()
    whole = dice.choice([0, 1, LIMIT // width - 1, LIMIT // width, LIMIT // width + 1, 5003, 4096])
    row = -(-whole // members)
    taken = dtype in (torch.float32, torch.bfloat16, torch.float16) and op != MAX and kind != "all_gather"
    taken = taken and (whole if kind == "all_reduce" else row * members) * width >= LIMIT
    if op == AVG and not taken:
        op = SUM  # which Gloo has
    if kind == "all_reduce":
        given = drawn(generator, members, whole, dtype)
        form = dice.choice(FORMS if taken else FORMS[:2])
        mine, expected = laid(given[me], form), given[me].clone()
        work = dist.all_reduce(mine, op, group, async_op=True)
        if not taken:
            dist.all_reduce(expected, op, twin)
        written, untouched, inputs = mine, [], given
    elif kind == "all_gather":
        given = drawn(generator, members, row, dtype)
        mine, written = given[me].clone(), torch.empty(row * members, dtype=dtype)
        work = dist.all_gather_into_tensor(written, mine, group, async_op=True)
        expected, untouched, inputs = torch.cat(given), [(mine, given[me])], given
    else:
        given = drawn(generator, members, row * members, dtype)
        mine, written, expected = given[me].clone(), torch.empty(row, dtype=dtype), torch.empty(row, dtype=dtype)
        rows = list(mine.view(members, -1).unbind()) if row else [mine] * members
        if kind == "reduce_scatter":
            work = dist.reduce_scatter_tensor(written, mine, op, group, async_op=True)
            if not taken:
                dist.reduce_scatter_tensor(expected, given[me].clone(), op, twin)
        else:
            work = dist.reduce_scatter(written, rows, op, group, async_op=True)
            if not taken:
                dist.reduce_scatter(
                    expected, list(given[me].clone().view(members, -1).unbind()) if row else rows, op, twin
                )
        untouched, inputs = [(mine, given[me])], [each.view(members, -1)[me] if row else each for each in given]

    def check():
        assert all(torch.equal(now, before) for now, before in untouched)
        if not taken:
            assert torch.equal(written, expected)
            return
        total = sum(each.double() for each in inputs) / (members if op == AVG else 1)
        largest = max(float(each.double().abs().max()) for each in given)
        limit = bound(members, largest, dtype) / (members if op == AVG else 1)
        assert float((written.reshape(-1).double() - total).abs().max()) <= limit
        if kind == "all_reduce":
            same = [torch.empty(whole * width, dtype=torch.uint8) for _ in range(members)]
            dist.all_gather(same, written.contiguous().view(-1).view(torch.uint8), twin)
            assert all(torch.equal(each, same[0]) for each in same)

    return work, check, taken


def sequences(rank, size, seed):
    """100 calls on three groups, up to five under way, waited for in an order of this rank's own."""
    members = [list(range(size)), list(range(size)), [0, 1]]
    groups, twins = [dist.new_group(each) for each in members], [dist.new_group(each) for each in members]
    places = [place for place, each in enumerate(members) if rank in each]
    handles = {place: gradwire.compress_group(groups[place], min_bytes=LIMIT) for place in places}
    shared, generator, own = random.Random(seed), torch.Generator().manual_seed(seed), random.Random(rank)
    taken = [0] * len(members)
    for _ in range(20):
        under_way = []
        for _ in range(5):
            place = shared.randrange(len(members))
            dice = random.Random(shared.random())
            numbers = torch.Generator().manual_seed(int(torch.randint(2**40, (1,), generator=generator)))
            if place in places:
                under_way.append((place, *one_call(dice, numbers, groups[place], twins[place])))
        for _, work, _, _ in own.sample(under_way, len(under_way)):
            work.wait()
        for place, _, check, compressed in under_way:
            check()
            taken[place] += compressed
    for place, handle in handles.items():
        assert handle.stats().calls == taken[place]
        assert taken[place]
        handle.close()


@pytest.mark.parametrize(("size", "seed"), [(2, 2), (3, 3)])
def test_random_sequences_stay_within_the_bound_and_leave_others_alone(ranks, size, seed):
    ranks.run(sequences, size, seed, timeout=120)


def odd_numbers(rank, size, compressor):
    handle = gradwire.compress_group(None, compressor, min_bytes=LIMIT)
    found = []
    for odd in (float("nan"), float("inf"), float("-inf")):
        tensor = torch.randn(3000)
        if rank == 1:
            tensor[1234] = odd
        rows = tensor.repeat(2)
        dist.all_reduce(tensor)
        output = torch.empty(3000)
        dist.reduce_scatter_tensor(output, rows)
        found += [bool(tensor[1234].isfinite()), bool(output[1234].isfinite())]
    handle.close()
    return found, handle.stats().calls


@pytest.mark.parametrize("compressor", ["int8", "bf16", "int4"])
def test_numbers_that_are_not_finite_come_through(ranks, compressor):
    assert ranks.run(odd_numbers, 2, compressor) == [([False] * 6, 6)] * 2


def differing(rank, size, arguments):
    gradwire.compress_group(None, **arguments[rank])


@pytest.mark.parametrize(
    "arguments",
    [
        [{"compressor": "int8"}, {"compressor": "bf16"}],
        [{"min_bytes": 10}, {"min_bytes": 11}],
        [{"gather": None}, {"gather": "bf16"}],
    ],
)
def test_ranks_that_pass_other_arguments_all_raise(ranks, arguments):
    failures = ranks.run(differing, 2, arguments, expect_errors=True)
    assert [each.type_name for each in failures] == ["ValueError"] * 2
    assert all("pass the same on all ranks" in each.message for each in failures)


def some_do_not_call(rank, size):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank == 0:
        gradwire.compress_group(group)


def test_ranks_that_do_not_call_it_are_named(ranks):
    failure, _ = ranks.run(some_do_not_call, 2, expect_errors=True)
    assert "for ranks [1], which have not: call it on all ranks" in failure.message


def dying(rank, size):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=10))
    gradwire.compress_group(group, min_bytes=LIMIT)
    dist.all_reduce(torch.ones(2000), group=group)
    if rank == 1:
        os._exit(3)
    work = dist.all_reduce(torch.ones(2000), group=group, async_op=True)
    try:
        work.wait()
    except RuntimeError as error:
        first = str(error)
    with pytest.raises(RuntimeError, match="reduces no more gradients"):
        dist.all_reduce(torch.ones(2000), group=group)
    raise RuntimeError(first)


def test_a_rank_that_dies_is_an_error_of_the_others(ranks):
    failure, dead = ranks.run(dying, 2, expect_errors=True)
    assert dead == LostRank(1, "died with exit code 3")
    assert failure.seconds < 11
    assert "the all-reduce of 8000 bytes" in failure.message
    assert "rank 1 has ended" in failure.message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"compressor": "powersgd"}, "takes int8, bf16, int4"),
        ({"compressor": "int4:error_feedback=true"}, "takes int8, bf16, int4"),
        ({"compressor": "int8:blocks=3"}, "no option 'blocks'"),
        ({"min_bytes": 0}, "at least 1"),
        ({"gather": "int8"}, r"None \(all-gathers stay as they are\) or 'bf16'"),
    ],
)
def test_what_it_does_not_take_is_refused_before_ranks_meet(group, arguments, said):
    with pytest.raises(ValueError, match=said):
        gradwire.compress_group(None, **arguments)


def test_it_needs_a_process_group():
    with pytest.raises(RuntimeError, match="no process group yet"):
        gradwire.compress_group()


def life(rank, size):
    """What a handle says, counts, leaves alone in `off()`, and gives back with `close()`."""
    with logged("compresses") as lines:
        handle = gradwire.compress_group(min_bytes=LIMIT)
    with pytest.raises(ValueError, match="compressed already"):
        gradwire.compress_group(min_bytes=LIMIT)
    values = torch.linspace(-1, 1, 2048)
    exact = 2 * values

    def reduced():
        tensor = values.clone()
        dist.all_reduce(tensor)
        return torch.equal(tensor, exact)

    rounded = reduced()
    with handle.off(), handle.off():
        off = reduced()
    again = reduced()
    stats = handle.stats()
    handle.close()
    return lines, [rounded, off, again, reduced()], (stats.calls, stats.bytes_before, stats.bytes_sent)


def test_a_handle_says_what_it_does_and_gives_the_group_back(ranks):
    told = "gradwire compresses all-reduces and reduce-scatters from 0.004096 MB: int8"
    row = 1024 + 4 * 1024 // 128  # a byte each, and a scale a block of 128
    row = -(-row // 16) * 16
    for rank, (lines, exact, stats) in enumerate(ranks.run(life, 2)):
        assert lines == ([told] if rank == 0 else [])
        assert exact == [False, True, False, True]
        assert stats == (2, 2 * 4 * 2048, 2 * 2 * row)


def futures(rank, size):
    handle = gradwire.compress_group(min_bytes=LIMIT, gather="bf16")
    leaf = torch.ones(2048, requires_grad=True)
    squares = (leaf * leaf).sum()  # has saved the leaf, whose numbers change without a word, as in torch
    work = dist.all_reduce(leaf, async_op=True)
    seen = work.get_future().then(lambda future: future.value()[0].sum()).wait()
    squares.backward()
    with torch.inference_mode():
        inner, output = torch.ones(2048), torch.empty(1024)
        dist.all_reduce(inner)
        dist.reduce_scatter_tensor(output, inner)
    parts = [torch.empty(2048) for _ in range(2)]
    mine = torch.full((2048,), 1 + rank / 1024)
    dist.all_gather(parts, mine)
    summed = functional.all_reduce(torch.ones(2048), "sum", dist.group.WORLD) + 0
    calls = handle.stats().calls
    handle.close()
    assert work.is_completed()
    near = [float((each - wanted).abs().max()) < 0.05 for each, wanted in ((inner, 2), (output, 4), (summed, 2))]
    return abs(float(seen) - 4096) < 50, near, [float(part[0]) for part in parts], float(mine[0]), calls


@operations_in_cpp
def test_works_futures_and_tensors_of_all_kinds(ranks):
    for rank, found in enumerate(ranks.run(futures, 2)):
        assert found == (True, [True] * 3, [1.0, 1.0], 1 + rank / 1024, 5)  # bf16 has no number between 1 and 1.0078


def by_reducers(rank, size):
    """Gradients of torch's DDP and FSDP1, whose reducers know nothing of this; and DDP with a hook of gradwire's."""
    handle, calls, gaps = gradwire.compress_group(min_bytes=LIMIT), [], []
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    everyone = torch.cat([torch.randn(8, 64, generator=torch.Generator().manual_seed(each)) for each in range(size)])

    def net():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))

    alone = net()
    alone(everyone).square().mean().backward()
    wanted = [parameter.grad for parameter in alone.parameters()]
    plain = nn.parallel.DistributedDataParallel(net())
    hooked = nn.parallel.DistributedDataParallel(net())
    gradwire.attach(hooked, "none")
    for model in (plain, hooked):
        model(inputs).square().mean().backward()
        gaps.append(max(float((p.grad - w).abs().max()) for p, w in zip(model.parameters(), wanted, strict=True)))
        calls.append(handle.stats().calls)
    sharded = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    sharded(inputs).square().mean().backward()
    calls.append(handle.stats().calls)
    norm = torch.tensor(sum(float(p.grad.square().sum()) for p in sharded.parameters() if p.grad is not None))
    dist.all_reduce(norm)
    gaps.append(abs(float(norm.sqrt()) / float(sum(w.square().sum() for w in wanted) ** 0.5) - 1))
    handle.close()
    return calls, gaps


@operations_in_cpp
def test_reducers_of_torch_are_compressed_and_hooks_of_gradwire_only_once(ranks):
    for calls, (plain, hooked, sharded) in ranks.run(by_reducers, 2):
        assert calls == [1, 1, 2]
        assert 1e-6 < plain < 1e-3
        assert hooked < 1e-7
        assert sharded < 1e-2


def of_gradwire_itself():
    values, transport = torch.linspace(-1, 1, 2048), over(dist.group.WORLD)
    total = transport.message(AllReduce(values.clone(), "sum")).wait(transport.limit)
    assert torch.equal(total, 2 * values)


def of_a_sparse_tensor():
    tensor = torch.eye(80).to_sparse()
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), 2 * torch.eye(80))


def of_sizes_that_do_not_fit_together():
    with pytest.raises((RuntimeError, ValueError)):
        dist.reduce_scatter_tensor(torch.empty(2000), torch.ones(4002))


def calls_of(rank, size, request):
    handle = gradwire.compress_group(min_bytes=1)
    request()
    handle.close()
    return handle.stats().calls


@pytest.mark.parametrize("request_", [of_gradwire_itself, of_a_sparse_tensor, of_sizes_that_do_not_fit_together])
def test_requests_that_are_left_to_torch(ranks, request_):
    assert ranks.run(calls_of, 2, request_) == [0, 0]


WAYS = {
    "a function": lambda tensor, group: dist.all_reduce(tensor, group=group),
    "a work": lambda tensor, group: dist.all_reduce(tensor, group=group, async_op=True).wait(),
    "C++": lambda tensor, group: group.allreduce([tensor]).wait(),
    "a functional collective": lambda tensor, group: functional.all_reduce(tensor, "sum", group) + 0,
}


def noticed(rank, size):
    """What each way of waiting raises once the other rank is gone."""
    groups = {way: dist.new_group([0, 1], timeout=timedelta(seconds=10)) for way in WAYS}
    for group in groups.values():
        gradwire.compress_group(group, min_bytes=LIMIT)
        dist.all_reduce(torch.ones(2000), group=group)
    if rank == 1:
        os._exit(3)
    for way, group in groups.items():
        with pytest.raises(RuntimeError) as raised:
            WAYS[way](torch.ones(2000), group)
        assert str(raised.value).startswith("the all-reduce of 8000 bytes: "), (way, str(raised.value))
        assert "\n\nAt:" not in str(raised.value)
    raise RuntimeError("noticed")


@operations_in_cpp
def test_a_failure_is_an_error_of_whoever_waits_and_begins_with_the_call(ranks):
    failure, _ = ranks.run(noticed, 2, expect_errors=True)
    assert failure.message == "noticed"


def lanes():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gradwire-lane")]


def destroyed(rank, size):
    before, group, other = lanes(), dist.new_group([0, 1]), dist.new_group([0, 1])
    kept = gradwire.compress_group(other, min_bytes=LIMIT)
    handle = weakref.ref(gradwire.compress_group(group, min_bytes=LIMIT))
    dist.all_reduce(torch.ones(2000), group=group)
    assert handle() is not None
    assert len(lanes()) > len(before)
    dist.destroy_process_group(group)
    del group
    dist.all_reduce(torch.ones(1))  # any call of any group
    gc.collect()
    left = handle(), [each for each in lanes() if each not in before]
    kept.close()
    return left


def test_nothing_is_left_of_a_group_that_was_destroyed_without_close(ranks):
    assert ranks.run(destroyed, 2) == [(None, [])] * 2


def tensors_kept(rank, size):
    handle, alive = gradwire.compress_group(min_bytes=LIMIT), []
    for ended in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        tensor = torch.ones(2000)
        work = dist.all_reduce(tensor, async_op=True)
        ended(work)
        alive.append(weakref.ref(tensor))
        del tensor, work
    deadline = time.monotonic() + 5  # a lane lets go of its task a moment later
    while any(each() is not None for each in alive) and time.monotonic() < deadline:
        time.sleep(0.01)
    found = [each() is not None for each in alive]
    handle.close()
    return found


def test_a_call_that_was_waited_for_keeps_no_tensor(ranks):
    assert ranks.run(tensors_kept, 2) == [[False, False]] * 2


def coalesced(rank, size):
    """Calls inside torch's coalescing manager are torch's, all-reduces with a factor are compressed."""
    handle = gradwire.compress_group(min_bytes=LIMIT)
    values = torch.linspace(-1, 1, 2048)
    many, output = [values.clone() for _ in range(3)], torch.empty(1024)
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in many:
            dist.all_reduce(tensor)
    manager.wait()
    with dist._coalescing_manager():
        dist.reduce_scatter(output, list(values.clone().view(2, -1).unbind()))
    dist.barrier()
    exact = [torch.equal(each, 2 * values) for each in many], handle.stats().calls
    scaled = values.clone()
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    calls = handle.stats().calls
    handle.close()
    return exact, float((scaled - values).abs().max()) < 0.02, calls


def test_coalesced_calls_stay_as_they_are_and_factors_hold(ranks):
    assert ranks.run(coalesced, 2) == [(([True] * 3, 0), True, 1)] * 2
