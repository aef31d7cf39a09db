import copy
import pickle
import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.experiments.workloads.emulation import EmulatedModel, Layer, Trace

from .given import TRACE, shapes

INPUTS = torch.zeros(4, 3)
OURS = gradwire.DistributedDataParallel
LITTLE_MORE = 2 * TRACE.seconds


def timed(model, clock, backward=True):
    """Seconds of forward and backward, and when each gradient was ready, since the start of backward."""
    ready = {}

    def hook_for(name):
        def hook(parameter):
            ready[name] = clock.perf_counter()

        return hook

    hooks = [each.register_post_accumulate_grad_hook(hook_for(name)) for name, each in model.named_parameters()]
    start = clock.perf_counter()
    output = model(INPUTS)
    middle = clock.perf_counter()
    if backward:
        output.backward()
    end = clock.perf_counter()
    for hook in hooks:
        hook.remove()
    return middle - start, end - middle, {name: when - middle for name, when in ready.items()}


@pytest.mark.parametrize("dilate", [1, 2])
def test_gradients_are_ready_in_reverse_order_when_the_backward_of_their_layer_is_over(clock, dilate):
    model = EmulatedModel(TRACE, dilate)
    due = {
        "scale": 0.02,
        "blocks.1.in.weight": 0.05,
        "blocks.1.in.bias": 0.05,
        "blocks.0.weight": 0.12,
        "blocks.0.bias": 0.12,
        "embedding.weight": 0.14,
    }
    forward, backward, ready = timed(model, clock)
    assert shapes(model) == TRACE.parameters
    assert [due[name] for name in ready] == sorted(due.values())
    for seconds, found in [(0.06, forward), (0.14, backward), *((due[name], when) for name, when in ready.items())]:
        assert found == pytest.approx(seconds * dilate, abs=1.01 * clock.oversleep)


def test_what_sleeps_last_too_long_does_not_add_up(clock):
    layers = tuple(Layer(f"{index}", {"weight": (2,)}, 0.0004, 0.0004) for index in range(200))
    model = EmulatedModel(Trace("fine", "", 1, layers))
    forward, backward, _ = timed(model, clock)
    assert forward == pytest.approx(0.08, abs=1.01 * clock.oversleep)
    assert backward == pytest.approx(0.08, abs=1.01 * clock.oversleep)
    assert model.late_seconds <= 2.01 * clock.oversleep


def test_gradients_have_a_heavy_tail_differ_by_step_and_scale_with_the_loss():
    model = EmulatedModel(Trace("wide", "", 1, (Layer("wide", {"weight": (300, 1000)}, 0.0, 0.0),)))
    gradients = []
    for scale in (1.0, 1.0, 1024.0):
        model.zero_grad()
        (model(INPUTS) * scale).backward()
        gradients.append(model.get_parameter("wide.weight").grad.flatten() / scale)
    for gradient in gradients:
        standardised = (gradient - gradient.mean()) / gradient.std()
        assert standardised.pow(4).mean() > 20  # of a normal distribution it is 3
        assert 1e-4 < gradient.abs().median() < 1e-2
    assert torch.corrcoef(torch.stack(gradients)).tril(-1).abs().max() < 0.5


def test_gradients_accumulate_and_frozen_parameters_have_none():
    model = EmulatedModel(TRACE)
    model.get_parameter("blocks.0.bias").requires_grad_(False)
    model(INPUTS).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model(INPUTS).backward()
    assert set(TRACE.parameters) - set(before) == {"blocks.0.bias"}
    assert all(not torch.equal(model.get_parameter(name).grad, gradient) for name, gradient in before.items())


def test_the_users_random_state_is_left_alone_and_models_can_be_copied_and_saved():
    state = torch.get_rng_state()
    model = EmulatedModel(TRACE)
    model(INPUTS).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(INPUTS).backward()
        twin.load_state_dict(model.state_dict())
    assert torch.equal(torch.get_rng_state(), state)


def trained(rank, world_size, ddp, options):
    """Seconds of each step of a wrapped model, of four or until one is quick on all ranks, and the gradients at the end, one
    step of them accumulated.
    """
    wrapped = ddp(EmulatedModel(TRACE), gradient_as_bucket_view=True, bucket_cap_mb=0.002, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    seconds, fastest = [], torch.tensor(torch.inf)
    while len(seconds) < 4 or (fastest > LITTLE_MORE and len(seconds) < 40):
        torch.distributed.barrier()
        start = time.perf_counter()
        wrapped(INPUTS).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        fastest = torch.tensor(min(seconds))
        torch.distributed.all_reduce(fastest, torch.distributed.ReduceOp.MAX)
    if not options.get("static_graph"):
        with wrapped.no_sync():
            wrapped(INPUTS).backward()
        own = wrapped.module.get_parameter("blocks.0.weight").grad.clone()
    else:
        own = torch.tensor(float(rank))
    wrapped(INPUTS).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in wrapped.parameters()])
    parameters = torch.cat([parameter.detach().flatten() for parameter in wrapped.parameters()])
    if ddp is OURS:
        wrapped.compression.close()
    return seconds, own, gradients, parameters


@pytest.mark.parametrize(
    ("ddp", "options"),
    [
        (TorchDDP, {}),
        (OURS, {}),
        (OURS, {"find_unused_parameters": True}),
        (OURS, {"static_graph": True}),
        (OURS, {"compressor": "powersgd:rank=1"}),
    ],
    ids=str,
)
def test_a_step_takes_the_traces_time_and_little_more_where_the_network_is_fast(ranks, ddp, options):
    first, second = ranks.run(trained, 2, ddp, options)
    for seconds, _, _, _ in (first, second):
        assert all(each >= TRACE.seconds for each in seconds[1:])
        assert min(seconds) <= LITTLE_MORE
    assert not torch.equal(first[1], second[1])  # ranks have gradients of their own,
    assert torch.equal(first[2], second[2])  # and their averages in common
    assert torch.equal(first[3], second[3])
    assert first[3].abs().sum() > 0
