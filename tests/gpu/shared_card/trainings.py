"""Trainings with DDP, each beside the same one over Gloo: equal bits where no sum's order differs, else close."""

import hashlib

import torch
from torch import nn

import gradwire

from .checks import check

STEPS, WIDTH, CLOSE = 20, 96, 0.02  # of the way that the control went
# By all-to-alls and all-gathers alone, so the bits do not depend on what carries them.
MOVED = ["int8", "int4", "int4:error_feedback=false", "int2", "onebit", "topk:ratio=0.05", "natural"]
MOVED += ["dgc:ratio=0.05", "int8:rounding=stochastic", "int4:residual_bits=8", "onebit:rotate=false"]
SUMMED = ["none", "bf16", "fp16", "powersgd:rank=4", "batched-powersgd", "fp16+powersgd:rank=2", "acp-powersgd:rank=2"]
SUMMED += ["powersgd:rank=2,start_iter=5", "randomk:ratio=0.1", "powersgd:rank=4,payload=int4"]
SUMMED += ["adaptive:ladder=none/int4,target=0"]
ON_HOSTS = ["none", "int4", "powersgd:rank=2", "topk:ratio=0.05", "onebit"]


def network(device, depth=4, width=WIDTH):
    """Return the same small network on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
        return nn.Sequential(*layers, nn.Linear(width, 8)).to(device)


def inputs(world, step, device, width=WIDTH):
    """Return a rank's inputs of a step."""
    generator = torch.Generator().manual_seed(1000 * world.rank + step)
    return torch.randn(16, width, generator=generator).to(device)


def flat(parameters):
    """Return all numbers of parameters, on the CPU."""
    return torch.cat([each.detach().reshape(-1).cpu() for each in parameters])


def train(world, model, optimizer, device, steps=range(STEPS), before=lambda step: None, width=WIDTH):
    """Train some steps; `before` is called ahead of each."""
    for step in steps:
        before(step)
        model(inputs(world, step, device, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(world, kind, spec, group=None, **settings):
    """Return a DDP model and its handle: gradwire's own, torch's with `attach`, or torch's with a hook."""
    net, ddp_class = network(world.device), nn.parallel.DistributedDataParallel
    settings = {"process_group": group, "bucket_cap_mb": 0.05, "gradient_as_bucket_view": True, **settings}
    if kind == "own":
        ddp = gradwire.DistributedDataParallel(net, compressor=spec, **settings)
        return ddp, ddp.compression
    ddp = ddp_class(net, **settings)
    if kind == "hook":
        ddp.register_comm_hook(None, gradwire.comm_hook(spec))
        return ddp, gradwire.handle_of(ddp)
    return ddp, gradwire.attach(ddp, spec)


def run(world, kind, spec, group=None, before=lambda step: None, **settings):
    """Return the parameters before and after a training."""
    ddp, handle = wrapped(world, kind, spec, group, **settings)
    first = flat(ddp.parameters())
    train(world, ddp, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9), world.device, before=before)
    last = flat(ddp.parameters())
    handle.close()
    return first, last


def check_alike(world, last, what):
    """Raise AssertionError unless all ranks have the same finite numbers."""
    sums = world.everyone(hashlib.sha256(last.numpy().tobytes()).hexdigest())
    assert len(set(sums)) == 1, f"{what}: the ranks differ: {sums}"
    assert last.isfinite().all(), f"{what}: not finite"


def compare(world, what, found, control, *, bits):
    """Raise AssertionError unless a training ended like its control; `bits`: with the same ones."""
    (first, last), (_, expected) = found, control
    check_alike(world, last, what)
    moved = float((expected - first).norm())
    assert moved > 0, f"{what}: nothing was trained"
    apart = float((last - expected).norm()) / moved
    world.told[what] = "bits" if torch.equal(last, expected) else f"{apart:.1e}"
    assert apart <= CLOSE, f"{what}: {apart:.3g} of the way from the run over Gloo"
    assert torch.equal(last, expected) or not bits, f"{what}: other bits than over Gloo, {apart:.3g}"


def compare_all(world, kind, specs, *, bits, **settings):
    """Compare trainings with some compressors to the same over Gloo."""
    for spec in specs:
        found, control = (run(world, kind, spec, group, **settings) for group in (None, world.gloo))
        compare(world, f"{kind} {spec} {' '.join(settings)}".strip(), found, control, bits=bits)


@check()
def own_moves(world):
    """gradwire's DDP with compressors that move bytes."""
    compare_all(world, "own", MOVED, bits=True)


@check()
def own_sums(world):
    """gradwire's DDP with compressors whose numbers are summed on the way."""
    compare_all(world, "own", SUMMED, bits=world.cpu)


@check()
def attached(world):
    """`attach` on torch's DDP."""
    compare_all(world, "attach", ["int4", "topk:ratio=0.05", "onebit"], bits=True)
    compare_all(world, "attach", ["none", "bf16", "powersgd:rank=4"], bits=world.cpu)


@check()
def hooked(world):
    """A communication hook of torch's DDP."""
    compare_all(world, "hook", ["int8"], bits=True)


@check(least=4)
def hosts_of_two(world):
    """Groups within and across hosts of two ranks."""
    compare_all(world, "own", [f"hosts:ranks=2+{spec}" for spec in ON_HOSTS], bits=False)
    compare_all(world, "attach", ["hosts:ranks=2+int4"], bits=False)


@check()
def settings_of_ddp(world):
    """Unused parameters, and a static graph."""
    for kind in ("own", "attach"):
        compare_all(world, kind, ["int4"], bits=True, find_unused_parameters=True)
        compare_all(world, kind, ["int4"], bits=True, static_graph=True)


@check()
def local_sgd(world):
    """LocalSteps beside the same on the CPU."""
    ends = []
    for device, group in ((world.device, None), (torch.device("cpu"), world.gloo)):
        net = network(device)
        first, optimizer = flat(net.parameters()), torch.optim.SGD(net.parameters(), lr=0.01)
        local = gradwire.LocalSteps(net, optimizer, every=4, fragments=2, compressor="int4", process_group=group)
        train(world, net, optimizer, device)
        local.finish()
        ends.append((first, flat(net.parameters())))
    compare(world, "LocalSteps", *ends, bits=False)
