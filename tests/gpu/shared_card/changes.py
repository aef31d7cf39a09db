"""What changes in mid-training: groups, compressors, orders, checkpoints, loss scales, inputs that end early."""

import copy
import tempfile

import torch
from torch import nn

import gradwire

from .checks import check
from .trainings import WIDTH, check_alike, flat, train, wrapped

RESUMED = (("own", "int4"), ("attach", "onebit"), ("own", "powersgd:rank=2"))
NEAR = 1e-4  # of the parameters' norm, for factors whose sums another order of ranks may change


@check(least=4)
def hosts_made_and_closed(world):
    """Groups end right behind a backward, while kernels are in flight, eight times."""
    for _ in range(8):
        ddp, handle = wrapped(world, "own", "hosts:ranks=2+int4")
        train(world, ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), world.device, range(3))
        handle.close()


@check(least=4)
def swapped(world):
    """A swap drops the groups of hosts, and makes others."""
    ddp, handle = wrapped(world, "own", "hosts:ranks=2+int4")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for spec in ("hosts:ranks=2+int4", "hosts:ranks=4+none", "int8", "hosts:ranks=2+powersgd:rank=2"):
        handle.swap(spec)
        train(world, ddp, optimizer, world.device, range(4))
    check_alike(world, flat(ddp.parameters()), "swapped")
    handle.close()


@check()
def overlapped(world):
    """`overlap` in each order ends as it does where every step waits."""
    for spec in ("int4", "powersgd:rank=2", "none"):
        ends = []
        for order in ("synchronous", "priority"):
            ddp, handle = wrapped(world, "own", spec)
            inner = torch.optim.SGD(ddp.parameters(), lr=0.05)
            optimizer = gradwire.overlap(ddp, inner, order=order, slice_mb=0.02)
            train(world, ddp, optimizer, world.device)
            optimizer.drain()
            ends.append(flat(ddp.parameters()))
            check_alike(world, ends[-1], f"{spec} {order}")
            handle.close()
        world.told[spec] = [torch.equal(ends[0], each) for each in ends[1:]]
        assert all(world.told[spec]) or spec != "int4", "overlap changes bits"


@check()
def resumed(world):
    """Ten steps behind a checkpoint are the same as those that went on without."""
    for kind, spec in RESUMED:
        ends, saved = [], None
        for _ in range(2):
            ddp, handle = wrapped(world, kind, spec)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
            parts = ddp.module, optimizer, handle
            if saved is None:
                train(world, ddp, optimizer, world.device, range(10))
                saved = copy.deepcopy([each.state_dict() for each in parts])
            else:
                for part, state in zip(parts, saved, strict=True):
                    part.load_state_dict(state)
            train(world, ddp, optimizer, world.device, range(10, 20))
            ends.append(flat(ddp.parameters()))
            check_alike(world, ends[-1], spec)
            handle.close()
        apart = float((ends[1] - ends[0]).norm() / ends[0].norm())
        world.told[f"{kind} {spec}"] = "bits" if torch.equal(*ends) else f"{apart:.1e}"
        assert apart == 0 or (spec.startswith("powersgd") and apart < NEAR), f"{spec} does not resume: {apart}"


@check()
def watched(world):
    """A training that is watched goes on from the states that rank 0 gathers and scatters."""
    folder = world.everyone(tempfile.mkdtemp())[0]
    ddp, handle = wrapped(world, "own", "int4")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with handle.watch(every=5, to=lambda report, *_: None, folder=folder):
        train(world, ddp, optimizer, world.device)
    assert handle.metrics()["ratio"] > 1
    handle.scatter_state_dict(handle.gather_state_dict())
    train(world, ddp, optimizer, world.device, range(2))
    check_alike(world, flat(ddp.parameters()), "watched")
    handle.close()


@check()
def overflow_on_one_rank(world):
    """A step that overflows on one rank is as one that was never made."""
    ends = []
    for overflows in (True, False):
        ddp, handle = wrapped(world, "own", "int4", undo=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler(world.device.type, init_scale=64.0, growth_interval=10**6)
        handle.follow(scaler)
        for step in range(8):
            if step == 4 and not overflows:
                scaler.update(32.0)
                continue
            scaled_step(world, ddp, optimizer, scaler, step)
        ends.append(flat(ddp.parameters()))
        check_alike(world, ends[-1], f"overflows: {overflows}")
        handle.close()
    assert torch.equal(*ends), "the step that was skipped has changed something"


def scaled_step(world, ddp, optimizer, scaler, step):
    """Train a step under GradScaler; the last rank's inputs of step 4 are infinite."""
    infinite = step == 4 and world.rank == world.size - 1
    given = torch.full((16, WIDTH), float("inf") if infinite else 0.1 * (step + world.rank), device=world.device)
    scaler.scale(ddp(given).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@check()
def uneven_inputs(world):
    """Each rank has one step more than the one before it, inside `join`."""
    ddp, handle = wrapped(world, "own", "int4")
    with ddp.join():
        train(world, ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), world.device, range(5 + world.rank))
    check_alike(world, flat(ddp.parameters()), "join")
    handle.close()


@check()
def synchronized_batch_norm(world):
    """The model's own collectives in backward, on the communicator of the gradients; it is for GPUs alone."""
    if world.cpu:
        return
    layers = [nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.BatchNorm1d(64)]
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers)).to(world.device)
    ddp = gradwire.DistributedDataParallel(net, compressor="int4", bucket_cap_mb=0.01)
    train(world, ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), world.device)
    check_alike(world, flat(ddp.parameters()), "SyncBatchNorm")
    ddp.compression.close()
