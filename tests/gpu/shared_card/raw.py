"""The backend itself: every collective that gradwire uses, against results that each rank computes alone."""

import contextlib

import torch
import torch.distributed as dist

from .checks import check

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
SIZES = (1, 1000, 1 << 20)


def numbers(world, count, dtype, rank):
    """Return small whole numbers of a rank, whose sums are exact in every type."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 16, (count,), generator=generator).to(dtype).to(world.device)


@check()
def versions(world):
    """Say what is here."""
    world.told = {"torch": torch.__version__, "ranks": world.size}
    if not world.cpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        world.told |= {"nccl": nccl, "gpu": torch.cuda.get_device_name(0)}


@check()
def collectives(world):
    """Sums, maxima, gathers, broadcasts, scatters and all-to-alls of four types in three sizes."""
    for dtype in DTYPES:
        for count in SIZES:
            every = [numbers(world, count, dtype, rank) for rank in range(world.size)]
            for name, found, expected in results(world, every):
                assert torch.equal(found, expected), f"{name} of {count} {dtype}"


def results(world, every):
    """Yield the name, the result and the expected result of each collective of these tensors."""
    mine, count, size = every[world.rank], len(every[0]), world.size
    total = torch.stack([each.long() for each in every]).sum(0).to(mine.dtype)
    dist.all_reduce(found := mine.clone())
    yield "all_reduce", found, total
    dist.all_reduce(found := mine.clone(), dist.ReduceOp.MAX)
    yield "maximum", found, torch.stack(every).amax(0)
    dist.all_gather_into_tensor(found := mine.new_empty(size * count), mine)
    yield "all_gather", found, torch.cat(every)
    dist.broadcast(found := mine.clone(), size - 1)
    yield "broadcast", found, every[-1]
    dist.reduce_scatter_tensor(found := torch.empty_like(mine), torch.cat([mine] * size))
    yield "reduce_scatter", found, total
    rows = torch.cat([(mine + place).to(mine.dtype) for place in range(size)])
    dist.all_to_all_single(found := torch.empty_like(rows), rows)
    yield "all_to_all", found, torch.cat([(each + world.rank).to(mine.dtype) for each in every])


@check()
def several_groups_at_once(world):
    """Three groups on two streams, 60 rounds, issued in one order on every rank, while the GPU computes."""
    half = max(1, world.size // 2)
    rows = [dist.new_group(list(range(first, first + half))) for first in range(0, world.size, half)]
    columns = [dist.new_group(list(range(first, world.size, half))) for first in range(half)]
    streams = [None, None] if world.cpu else [torch.cuda.Stream(priority=-1), torch.cuda.Stream()]
    turns = [(streams[0], rows[world.rank // half]), (streams[1], columns[world.rank % half]), (streams[0], None)]
    matrix, waiting = torch.randn(512, 512, device=world.device), []
    for _ in range(60):
        for stream, group in turns:
            with on(stream):
                tensor = torch.ones(50_000, device=world.device)
                waiting.append((stream, group, tensor, dist.all_reduce(tensor, group=group, async_op=True)))
        matrix = (matrix @ matrix).tanh()
    for stream, _, _, work in waiting:
        with on(stream):
            work.wait()
    world.wait()
    assert all((tensor == dist.get_world_size(group)).all() for _, group, tensor, _ in waiting)


def on(stream):
    """Return a context in which a stream is the current one."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
