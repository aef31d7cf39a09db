"""What users do between steps is the same with overlap, bit for bit, at any moment."""

import copy
import io
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwire

from ..errors import message_of, warned
from .overlapped import STEPS, Layers, Plain, Setting, equal

CASES = {}


def case(**options):
    """Register a training: it is given a Setting, and returns what it has seen beside the end state."""

    def add(function):
        CASES[function.__name__] = function, options
        return function

    return add


def loop(
    setting,
    between=lambda *_: None,
    steps=STEPS,
    *,
    clear=lambda setting: setting.optimizer.zero_grad(),
    backward=lambda setting: setting.loss().backward(),
    read=lambda *_: None,
    step=lambda setting, _: setting.optimizer.step(),
    waits=False,
):
    """Steps as users write them: what was seen after each backward, by `read`, and after each step.

    `waits`: that, or the step, waits for updates; whether any was under way is noted before.
    """
    seen = []
    for number in range(steps):
        clear(setting)
        backward(setting)
        under_way = setting.pending
        seen.append(read(setting, number))
        step(setting, number)
        setting.names.append(under_way if waits else setting.pending)
        seen.append(between(setting, number))
    return seen


@case()
def gradients_are_read(setting):
    return loop(setting, read=lambda setting, _: setting.model.module.large.weight.grad.clone(), waits=True)


@case()
def gradients_are_clipped(setting):
    norm = lambda setting, _: nn.utils.clip_grad_norm_(setting.model.parameters(), 0.5)  # noqa: E731
    return loop(setting, clear=lambda setting: setting.model.zero_grad(), read=norm, waits=True)


@case(net=Plain)
def losses_are_scaled(setting):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(STEPS):
        setting.optimizer.zero_grad()
        loss = setting.loss() * (float("inf") if step == 2 else 1)
        scaler.scale(loss).backward()
        setting.names.append(setting.pending)
        scaler.step(setting.optimizer)
        scaler.update()
    return scaler.get_scale()


@case()
def a_scheduler_steps_after_the_optimizer(setting):
    scheduler = torch.optim.lr_scheduler.StepLR(setting.optimizer, 1, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return loop(setting, lambda setting, _: scheduler.step() or setting.optimizer.param_groups[0]["lr"])


@case()
def gradients_are_zeroed_in_place(setting):
    loop(setting, lambda setting, _: setting.optimizer.zero_grad(set_to_none=False), clear=lambda _: None)
    return [parameter.grad.clone() for parameter in setting.model.parameters()]


@case()
def gradients_are_cleared_twice(setting):
    def twice(setting, number):
        for to_none in ((False, True), (True, False))[number % 2]:
            setting.optimizer.zero_grad(set_to_none=to_none)
        return [parameter.grad is None for parameter in setting.model.parameters()]

    return loop(setting, twice, clear=lambda _: None)


@case()
def gradients_pile_up_over_micro_batches(setting):
    def backwards(setting):
        for _ in range(2):
            with setting.model.no_sync():
                setting.loss().backward()
        setting.loss().backward()

    loop(setting, backward=backwards)


@case()
def gradients_are_cleared_without_a_step(setting):
    def clear(setting):
        for parameter in setting.model.parameters():
            parameter.grad = None

    step = lambda setting, number: setting.optimizer.step() if number % 2 else None  # noqa: E731
    loop(setting, clear=clear, step=step, waits=True)


@case()
def two_steps_are_taken_of_one_gradient(setting):
    def again(setting, _):
        setting.optimizer.param_groups[0]["lr"] *= 0.5
        setting.optimizer.step()

    return loop(setting, again)


@case(net=Plain)
def the_model_is_evaluated(setting):
    inputs = torch.ones(4, 16)

    def evaluate(setting, step):
        with torch.no_grad():
            return setting.model(inputs) if step % 2 else setting.model.module(inputs)

    return loop(setting, evaluate)


@case()
def averages_of_parameters_are_kept(setting):
    mean = torch.optim.swa_utils.AveragedModel(
        setting.model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    loop(setting, lambda setting, _: mean.update_parameters(setting.model.module))
    return [each.clone() for each in mean.parameters()]


@case()
def the_model_is_copied(setting):
    return loop(setting, lambda setting, _: list(copy.deepcopy(setting.model.module).parameters()))


@case(net=Plain)
def the_wrapped_model_and_the_optimizer_are_copied(setting):
    def copies(setting, _):
        optimizer = copy.deepcopy(setting.optimizer)  # which asks it as pickle does
        assert type(optimizer) is torch.optim.AdamW
        return [*copy.deepcopy(setting.model).state_dict().values(), optimizer.state_dict()["param_groups"][0]["lr"]]

    return loop(setting, copies)


@case(compressor="topk:ratio=0.1", slice_mb=0.002)
def states_are_saved(setting):
    def states(setting, step):
        which = (setting.model, setting.optimizer, setting.model.compression)[step % 3]
        file = io.BytesIO()
        torch.save(which.state_dict(), file)
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        return state["parameters"] if step % 3 == 2 else list(state.values())[:1] if step % 3 else list(state.values())

    return [each for place, each in enumerate(loop(setting, states, 6)[1::2]) if place % 3 != 1]


@case(compressor="topk:ratio=0.1", slice_mb=0.002)
def a_checkpoint_is_loaded(setting):
    saved = []

    def save_and_load(setting, step):
        parts = (setting.model, setting.optimizer, setting.model.compression)
        if step == 2:
            saved.extend(copy.deepcopy([part.state_dict() for part in parts]))
        if step == 4:
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)

    return loop(setting, save_and_load, 7)


@case(compressor="bf16", net=Plain)
def compression_is_closed(setting):
    loop(setting)
    setting.model.compression.close()
    assert not setting.pending
    return [parameter.detach().clone() for parameter in setting.model.parameters()]


@case(net=Plain, optimizer=torch.optim.SGD)
def another_optimizer_has_the_same_parameters(setting):
    other = torch.optim.Adam(setting.model.parameters(), lr=0.01)
    return loop(setting, lambda *_: other.step())


@case(compressor="bf16", net=Plain)
def compressors_are_swapped(setting):
    specs = ["topk:ratio=0.1", "bf16", "none"]
    return loop(
        setting, lambda setting, step: setting.model.compression.swap(specs[step // 2]) if step % 2 else None, 7
    )


@case(compressor="int8", slice_mb=0.001)
def compressors_are_swapped_between_forward_and_backward(setting):
    """To one that cannot cut parameters, and back."""
    specs = {1: "powersgd:rank=1,min_compression_rate=0", 3: "topk:ratio=0.1"}
    for step in range(STEPS + 1):
        setting.optimizer.zero_grad()
        loss = setting.loss()
        if step in specs:
            setting.model.compression.swap(specs[step])
        loss.backward()
        setting.optimizer.step()
        setting.names.append(setting.pending)


@case(compressor="topk:ratio=0.1", slice_mb=0.002)
def steps_are_discarded(setting):
    def step(setting, number):
        setting.model.compression.discard_step() if number % 2 else setting.optimizer.step()

    loop(setting, step=step, waits=True)


@case()
def an_old_graph_adds_to_gradients(setting):
    def backwards(setting):
        first = setting.loss(setting.model.module)
        setting.loss().backward()
        first.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gradients that come late, which is meant
        loop(setting, backward=backwards, waits=True)


@case()
def an_optimizer_has_groups_and_hooks(setting):
    setting.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5, "weight_decay": 0.1})
    extra, calls = setting.optimizer.param_groups[1]["params"][0], []
    setting.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    setting.optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def between(setting, _):
        extra.grad = torch.ones(3)
        return extra.detach().clone()

    return [loop(setting, between), calls]


@case(optimizer=torch.optim.SGD)
def the_optimizers_state_is_read(setting):
    setting.optimizer.param_groups[0]["momentum"] = 0.9
    first = next(iter(setting.model.parameters()))
    return loop(setting, lambda setting, _: setting.optimizer.state[first]["momentum_buffer"].clone())


@case(net=Plain)
def an_error_comes_up_in_forward(setting):
    def fails(setting, _):
        with pytest.raises(RuntimeError, match="shapes"):
            setting.model(torch.ones(3, 5))

    return loop(setting, fails)


class Checkpointed(Plain):
    def forward(self, inputs):
        hidden = checkpoint(self[0], inputs, use_reentrant=False)
        return checkpoint(nn.Sequential(*list(self)[1:]), hidden, use_reentrant=False)


def of_matrices(parameters, lr):
    """Muon, which takes nothing else; torch 2.8 has none."""
    parameters = list(parameters)
    if not hasattr(torch.optim, "Muon"):
        return torch.optim.Adafactor(parameters, lr=lr)
    return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], lr=lr)


def two_forwards(setting):
    (setting.loss() + setting.loss()).backward()


CASES |= {  # trainings without anything between steps
    "gradients_are_never_cleared": (partial(loop, clear=lambda _: None), {}),
    "forward_runs_twice_before_backward": (partial(loop, backward=two_forwards), {}),
    "gradients_are_views_of_buckets": (loop, {"net": Plain, "gradient_as_bucket_view": True}),
    "layers_are_computed_again_in_backward": (loop, {"net": Checkpointed}),
    "the_optimizer_orthogonalizes_matrices": (loop, {"optimizer": of_matrices}),
    "the_optimizer_keeps_sums_of_rows_and_columns": (loop, {"optimizer": torch.optim.Adafactor}),
    "the_graph_is_static": (loop, {"compressor": "bf16", "static_graph": True}),
}


def both(rank, world_size, name):
    """What a case has seen and the end state, without overlap and with it, and whether anything was ever under way."""
    function, options = CASES[name]
    results = []
    for order in ("synchronous", "priority"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*reads parameters or gradients")
            warnings.filterwarnings("ignore", message=".*averaged and then cleared")
            setting = Setting(rank, order, **options)
            seen = function(setting)
            results.append((seen, setting.names, setting.end()))
    (seen, never, end), (other_seen, overlapped, other_end) = results
    return equal(seen, other_seen), equal(end, other_end), any(never), any(overlapped)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_loop_is_the_same_with_overlap(ranks, name):
    for same_seen, same_end, waited, overlapped in ranks.run(both, 2, name):
        assert same_seen
        assert same_end
        assert (waited, overlapped) == (False, True)


def adversaries(rank, world_size):
    """Two models that train against each other, each with its optimizer; whether it is the same with overlap."""
    results = []
    for order in ("synchronous", "priority"):
        maker, judge = (Setting(rank, order, net=Plain, optimizer=torch.optim.SGD) for _ in range(2))
        for _ in range(STEPS):
            noise = torch.randn(4, 16, generator=maker.generator)
            judge.optimizer.zero_grad()
            (judge.model(maker.model(noise).detach()).mean() - judge.loss()).backward()
            judge.optimizer.step()
            maker.optimizer.zero_grad()
            judge.model(maker.model(noise)).mean().backward()
            maker.optimizer.step()
        results.append([maker.end(), judge.end()])
    return equal(*results)


def test_two_models_that_train_against_each_other(ranks):
    assert ranks.run(adversaries, 2) == [True, True]


HIDDEN = {  # models whose reads of parameters nobody sees
    "compiled": lambda: torch.compile(Layers(), backend="eager"),
    "scripted": lambda: nn.Sequential(*(torch.jit.script(layer) for layer in Layers())),
}


def unseen(rank, world_size, kind):
    results = []
    for order in ("synchronous", "priority"):
        with warned("torch.compile or TorchScript") as told:
            setting = Setting(rank, order, net=HIDDEN[kind])
            loop(setting)
        results.append((setting.end(), len(told), any(setting.names)))
    (one, *synchronous), (other, *overlapped) = results
    return equal(one, other), synchronous, overlapped


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_compiled_or_scripted_model_waits_where_forward_begins_and_that_is_said(ranks, kind):
    assert ranks.run(unseen, 2, kind) == [(True, [0, False], [1, True])] * 2


def cleared_without_waiting(rank, world_size):
    setting = Setting(rank, "priority", net=Plain)
    setting.step()
    waits = []
    for clear in (setting.optimizer.zero_grad, setting.model.zero_grad):
        setting.step()
        clear()
        waits.append(setting.pending)
    setting.end()
    return waits


def test_clearing_gradients_does_not_wait(ranks):
    assert ranks.run(cleared_without_waiting, 2) == [[True, True]] * 2


def read_at_every_step(rank, world_size):
    with warned() as told:
        setting = Setting(rank, "priority", net=Plain)
        for _ in range(6):
            setting.optimizer.zero_grad()
            setting.loss().backward()
            nn.utils.clip_grad_norm_(setting.model.parameters(), 1.0)
            setting.optimizer.step()
    report = setting.optimizer.report()
    setting.end()
    return told, report.readers


def test_who_makes_every_step_wait_is_named_once(ranks):
    for (told,), readers in ranks.run(read_at_every_step, 2):
        assert "test_overlap_cases.py:" in told
        assert "in read_at_every_step reads parameters or gradients" in told
        ((where, count),) = readers.items()
        assert where in told
        assert count == 6


def told_to_be_synchronous(rank, world_size):
    told = []
    for options in (
        {"find_unused_parameters": True},
        {"net": lambda: nn.Sequential(nn.Embedding(16, 16, sparse=True))},
        {"net": lambda: nn.Sequential(nn.Embedding(16, 16, sparse=True)), "static_graph": True},
    ):
        with warned() as texts:
            setting = Setting(rank, "priority", optimizer=torch.optim.SGD, **options)
            setting.loss = lambda model=None, s=setting: s.model(torch.full((2, 3), s.rank + 1)).square().mean()
            loop(setting, steps=2)
            setting.end()
        told.append((texts, any(setting.names)))
    return told


def said_of(what):
    return [f"with {what} gradwire.overlap() does not overlap: steps wait at the end of backward"]


def test_what_cannot_overlap_is_synchronous_and_that_is_said_once(ranks):
    unused, sparse = said_of("find_unused_parameters=True"), said_of("sparse gradients")
    assert ranks.run(told_to_be_synchronous, 2) == [[(unused, False), (sparse, False), (sparse, False)]] * 2


def differentiated(rank, world_size):
    with warned("does not overlap") as texts:
        setting = Setting(rank, "priority", net=Plain, optimizer=torch.optim.SGD)
        for _ in range(2):
            setting.loss().backward(create_graph=True)
            setting.names.append(setting.pending)
            setting.optimizer.step()
            setting.optimizer.zero_grad()
        setting.end()
    return texts, any(setting.names)


def test_a_backward_that_makes_a_graph_is_synchronous_and_that_is_said_once(ranks):
    assert ranks.run(differentiated, 2) == [(said_of("create_graph=True"), False)] * 2


def reported_without_overlap(rank, world_size):
    """Step and exposed time of reports: of a synchronous training, and before and after a step that does not overlap."""
    synchronous = Setting(rank, "synchronous", net=Plain)
    synchronous.step()
    setting, reports = Setting(rank, "priority", net=Plain), [synchronous.optimizer.report()]
    for create_graph in (False, True):
        setting.optimizer.zero_grad()
        setting.loss().backward(create_graph=create_graph)
        setting.optimizer.step()
        setting.optimizer.drain()
        reports.append(setting.optimizer.report())
    synchronous.end()
    setting.end()
    return [(report.step, report.exposed) for report in reports]


def test_a_step_that_does_not_overlap_counts_and_has_no_exposed_time(ranks):
    for synchronous, overlapped, behind in ranks.run(reported_without_overlap, 2):
        assert synchronous == (1, None)
        assert overlapped[0] == 1
        assert overlapped[1] > 0
        assert behind == (2, None)


def uneven(rank, world_size):
    results = []
    for order in ("synchronous", "priority"):
        setting = Setting(rank, order, net=Plain, optimizer=torch.optim.SGD)
        with setting.model.join(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop(setting, steps=3 + rank)
        results.append(setting.end())
        assert not any(setting.names)
    return equal(*results)


def test_uneven_inputs_are_synchronous(ranks):
    assert ranks.run(uneven, 2) == [True, True]


class Own(torch.optim.SGD):
    """Somebody's."""


def refused(words, function, *args, **kwargs):
    text = message_of(function, *args, **kwargs)
    assert re.search(words, text), text


def refusals(rank, world_size):
    model, sgd = gradwire.DistributedDataParallel(Plain()), torch.optim.SGD
    parameters, theirs = list(model.parameters()), nn.parallel.DistributedDataParallel(Plain())
    refused("takes a model wrapped in gradwire.Distr", gradwire.overlap, theirs, sgd(parameters))
    refused("does not take LBFGS.*use it without overlap", gradwire.overlap, model, torch.optim.LBFGS(parameters))
    refused("per_parameter=True", gradwire.overlap, model, Own(parameters))
    refused("one of priority, synchronous", gradwire.overlap, model, sgd(parameters), order="first")
    refused("above 0, got 0", gradwire.overlap, model, sgd(parameters), slice_mb=0)
    refused("none of the model's parameters", gradwire.overlap, model, sgd([nn.Parameter(torch.ones(2))]))
    refused("differentiable=True", gradwire.overlap, model, sgd(parameters, differentiable=True))
    refused("capturable=True", gradwire.overlap, model, torch.optim.Adam(parameters, capturable=True))
    optimizer = gradwire.overlap(model, Own(parameters), per_parameter=True)
    refused("a list of all its optimizers", gradwire.overlap, model, sgd(parameters))
    refused("overlapped already", gradwire.overlap, gradwire.DistributedDataParallel(Plain()), optimizer)
    refused(r"call loss.backward\(\) before step", optimizer.step, lambda: None)
    refused("compressor=", model.register_comm_hook, None, lambda state, bucket: None)
    replaced = sgd(parameters)
    replaced.step = lambda: None
    refused("before that", gradwire.overlap, gradwire.DistributedDataParallel(Plain()), replaced)


def test_what_cannot_be_right_is_refused_with_the_way_out(ranks):
    ranks.run(refusals, 2)


def captured(rank, world_size):
    """What a captured backward raises, and the forward after it."""
    setting = Setting(rank, "priority", net=Plain)
    setting.step()
    setting.model._overlap._refuses_capture = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        told = [message_of(setting.step).removeprefix("RuntimeError: ") for _ in range(2)]
    setting.model.compression.close()
    return told


def test_a_step_that_a_cuda_graph_captures_is_refused_and_the_forward_after_it_names_the_reason_too(ranks):
    for first, second in ranks.run(captured, 2):
        assert "capture without overlap" in first
        assert "order='synchronous'" in first
        assert first in second
