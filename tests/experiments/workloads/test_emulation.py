"""The emulated accelerator: traces, and models whose layers take their time."""

import copy
import json
import pickle
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.experiments.cli import main
from gradwire.experiments.workloads.emulation import (
    Layer,
    Trace,
    chosen_trace,
    dilated,
    emulated,
    from_flops,
    labels,
    load_trace,
    measured,
    trace_names,
)
from gradwire.experiments.workloads.emulation.options import check_dilation
from gradwire.experiments.workloads.models import ModelConfig, build_model

from ..given import VISION_PARAMETERS

INPUTS = torch.zeros(4, 3)
LAYERS = (
    Layer("embedding", {"weight": (40, 30)}, 0.01, 0.02),
    Layer("blocks.0", {"weight": (30, 20), "bias": (30,)}, 0.03, 0.06),
    Layer("blocks.0.activation", {}, 0.01, 0.01),
    Layer("blocks.1", {"in.weight": (5, 5), "in.bias": (5,)}, 0.0, 0.03),
    Layer("", {"scale": (7,)}, 0.01, 0.02),
)
TRACE = Trace("small", "made up", 4, LAYERS)
OURS = gradwire.DistributedDataParallel
PARAMETERS = VISION_PARAMETERS | {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt-20m": 19_176_704,
    "resnet18-cifar": 11_173_962,
}


def shapes(model):
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def definitions():
    """Models whose shapes and operations are not ours to define, or defined elsewhere: {trace: (model, batch)}."""
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True, norm_first=True)
        blocks = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
        transformer = nn.Sequential(nn.Embedding(256, 512), blocks, nn.Linear(512, 256))
        return {
            "gpt-20m": (transformer, torch.zeros(4, 32, dtype=torch.int64)),
            "resnet18-cifar": (build_model(ModelConfig("resnet18-cifar")), torch.zeros(128, 3, 32, 32)),
        }


def assert_defined_as(name, model, batch):
    trace = load_trace(name)
    counted = from_flops(model, batch, name=name, source="", samples_per_second=trace.batch_size / trace.seconds)
    assert trace.parameters == shapes(model)
    assert trace.batch_size == counted.batch_size
    for way in ("forward_seconds", "backward_seconds"):
        expected = {layer.name: getattr(layer, way) for layer in counted.layers}
        assert {layer.name: getattr(layer, way) for layer in trace.layers if layer.parameters} == pytest.approx(
            {layer.name: expected[layer.name] for layer in trace.layers if layer.parameters}
        )


@pytest.mark.parametrize("name", definitions())
def test_a_shipped_trace_has_the_shapes_and_operations_of_torchs_modules(name):
    assert_defined_as(name, *definitions()[name])


@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d", "vgg19"])
def test_a_shipped_trace_has_the_shapes_and_operations_of_torchvisions_model(name):
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        assert_defined_as(name, models.get_model(name), torch.zeros(32, 3, 224, 224))


@pytest.mark.parametrize("name", trace_names())
def test_shipped_traces_are_of_the_known_sizes_and_say_where_their_time_is_from(name):
    trace = load_trace(name)
    assert trace.elements == PARAMETERS[name]
    assert trace.backward_seconds == pytest.approx(2 * trace.forward_seconds)
    assert ("published" in trace.source) == name.startswith(("resnet50", "resnet101", "resnext"))
    assert ("assumption" in trace.source) != ("published" in trace.source)


def test_scaling_keeps_proportions_and_is_said_in_the_source():
    trace = load_trace("resnet50@0.2")
    ratios = [new.backward_seconds / old.backward_seconds for new, old in paired(trace) if old.backward_seconds]
    assert trace.seconds == pytest.approx(0.2)
    assert ratios == pytest.approx([0.2 / 0.097] * len(ratios))
    assert trace.source.endswith("scaled to 0.2 s a step by the user")


def paired(trace):
    return zip(trace.layers, load_trace(trace.name).layers, strict=True)


def test_a_trace_survives_its_file(tmp_path):
    TRACE.write(tmp_path / "small.json")
    assert load_trace(str(tmp_path / "small.json")) == TRACE
    assert load_trace(f"{tmp_path / 'small.json'}@2").seconds == pytest.approx(2)
    assert json.loads((tmp_path / "small.json").read_text())["layers"][1]["parameters"] == {
        "weight": [30, 20],
        "bias": [30],
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 0}, "batch_size .* at least 1, got 0"),
        ({"batch_size": "4"}, "batch_size .* got '4'"),
        ({"name": 3}, "name of the trace is text, got 3"),
        ({"layers": {}}, "layers is a list, got dict"),
        ({"layers": []}, "has no parameters"),
        ({"colour": 1}, "the trace has the keys batch_size, layers, name, source; got the keys .*colour"),
        ({"layers": [[]]}, "layer 0 has the keys .*; got list"),
        ({"layers.0.forward_seconds": -1}, "forward_seconds of layer 'embedding' .* got -1"),
        ({"layers.0.backward_seconds": float("nan")}, "backward_seconds .* got nan"),
        ({"layers.0.backward_seconds": "1"}, "backward_seconds .* got '1'"),
        ({"layers.0.parameters": []}, "parameters of layer 0 map names to lists"),
        ({"layers.0.parameters": {"weight": 3}}, "parameters of layer 0 map names to lists"),
        ({"layers.0.parameters": {"weight": [3, 0]}}, r"shape of 'embedding.weight' .* got \[3, 0\]"),
        ({"layers.0.parameters": {"weight": [2.5]}}, r"shape of 'embedding.weight' .* got \[2.5\]"),
        ({"layers.0.name": "blocks.0"}, "several layers called 'blocks.0'"),
        (
            {"layers.0.name": "blocks", "layers.0.parameters": {"0.bias": [3]}},
            "several parameters called 'blocks.0.bias'",
        ),
        ({"layers.0.name": "blocks", "layers.0.parameters": {"1": [3]}}, "'blocks.1' is a parameter and a module"),
    ],
    ids=str,
)
def test_a_bad_trace_is_refused_with_what_is_wrong(change, words, tmp_path):
    path = tmp_path / "bad.json"
    TRACE.write(path)
    document = json.loads(path.read_text())
    for key, value in change.items():
        *groups, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        place = document
        for group in groups:
            place = place[group]
        place[last] = value
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"bad.json is no trace: .*{words}"):
        load_trace(str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "resnet5",
            r"no trace 'resnet5' \(did you mean resnet50\?\); there are: resnet50, .* or the name of a JSON file",
        ),
        ("resnet50@fast", "seconds of computation a step, as in resnet50@0.1; got 'resnet50@fast'"),
        ("resnet50@0", "above 0, got 0"),
        ("resnet50@inf", "above 0, got inf"),
        (__file__, "cannot read the trace .*test_emulation.py"),
    ],
)
def test_what_is_no_trace_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        load_trace(text)


def test_names_that_no_module_can_have_are_refused():
    with pytest.raises(ValueError, match=r"no module can have a parameter called 'forward.weight'.*forward"):
        emulated(Trace("odd", "", 1, (Layer("forward", {"weight": (1,)}, 0, 0),)))


def test_compute_dilation_and_their_labels():
    assert chosen_trace("real") is None
    assert labels(None) == []
    trace = chosen_trace("emulate:vgg19@0.5")
    assert labels(trace) == ["emulated compute vgg19, 0.5 s a step"]
    assert labels(trace, 4) == ["emulated compute vgg19, 0.5 s a step", "dilated 4"]
    assert [dilated(rate, 4) for rate in ("100mbit", "1gbit", "1.5 Gbit", "0", "800")] == [
        "25mbit",
        "0.25gbit",
        "0.375Gbit",
        "0",
        "200",
    ]
    with pytest.raises(ValueError, match="compute is real, or emulate: and a trace"):
        chosen_trace("emulated")
    with pytest.raises(ValueError, match="such as 100mbit"):
        dilated("fast", 2)
    with pytest.raises(ValueError, match="needs an emulated accelerator"):
        check_dilation(2, "real")
    for bad in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            check_dilation(bad, "emulate:vgg19")
        with pytest.raises(ValueError, match="above 0"):
            emulated(TRACE, bad)


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
    model = emulated(TRACE, dilate)
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
    model = emulated(Trace("fine", "", 1, layers))
    forward, backward, _ = timed(model, clock)
    assert forward == pytest.approx(0.08, abs=1.01 * clock.oversleep)
    assert backward == pytest.approx(0.08, abs=1.01 * clock.oversleep)
    assert model.late_seconds <= 2.01 * clock.oversleep


def test_on_a_real_clock_it_takes_the_traces_time():
    model = emulated(TRACE)
    forward, backward, ready = timed(model, time)
    assert forward >= 0.06
    assert backward >= max(ready.values()) >= 0.14


def test_it_takes_hardly_any_of_the_processor():
    model = emulated(TRACE, dilate=2)
    timed(model, time)
    start = time.process_time()
    timed(model, time)
    assert time.process_time() - start < 0.1 * TRACE.seconds * 2


def test_gradients_have_a_heavy_tail_differ_by_step_and_scale_with_the_loss():
    model = emulated(Trace("wide", "", 1, (Layer("wide", {"weight": (300, 1000)}, 0.0, 0.0),)))
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
    model = emulated(TRACE)
    model.get_parameter("blocks.0.bias").requires_grad_(False)
    model(INPUTS).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model(INPUTS).backward()
    assert set(TRACE.parameters) - set(before) == {"blocks.0.bias"}
    assert all(not torch.equal(model.get_parameter(name).grad, gradient) for name, gradient in before.items())


def test_without_gradients_there_is_only_a_forward(clock):
    with torch.no_grad():
        forward, backward, _ = timed(emulated(TRACE), clock, backward=False)
    assert forward == pytest.approx(0.06, abs=1.01 * clock.oversleep)
    assert backward == 0


def test_the_users_random_state_is_left_alone_and_models_can_be_copied_and_saved():
    state = torch.get_rng_state()
    model = emulated(TRACE)
    model(INPUTS).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(INPUTS).backward()
        twin.load_state_dict(model.state_dict())
    assert torch.equal(torch.get_rng_state(), state)


class Pair(nn.Module):
    """Modules as traces see them: one parameter outside of them, glue between them, one called twice, one never."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.twice = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, inputs):
        hidden, _ = self.attention(*[inputs + self.token] * 3)
        return self.out(self.twice(torch.relu(self.twice(hidden))))


def test_a_measured_trace_covers_the_time_and_the_parameters_of_a_model():
    model = Pair()
    trace = measured(model, torch.randn(16, 12, 8), name="pair", source="here", repeats=3)
    names = [layer.name for layer in trace.layers]
    assert trace.parameters.items() == shapes(model).items()
    assert names.index("attention") < names.index("twice") < names.index("out")
    assert next(layer for layer in trace.layers if layer.name == "attention").parameters.keys() == {
        "in_proj_weight",
        "in_proj_bias",
        "out_proj.weight",
        "out_proj.bias",
    }
    used = [layer for layer in trace.layers if layer.name in ("attention", "twice", "out")]
    assert all(layer.forward_seconds > 0 and layer.backward_seconds > 0 for layer in used)
    assert trace.batch_size == 16


def test_measured_time_is_where_it_is_spent(clock):
    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            clock.sleep(0.02)
            return inputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            clock.sleep(0.03)
            return gradient

    class Slow(nn.Linear):
        def forward(self, inputs):
            return Sleep.apply(super().forward(inputs))

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), Slow(4, 4), nn.Identity(), nn.Linear(4, 1))
    trace = measured(model, torch.randn(2, 4), name="slow", source="here", repeats=3)
    assert [layer.name for layer in trace.layers] == ["0", "1", "2", "3", "4"]
    for way, seconds in (("forward_seconds", 0.02), ("backward_seconds", 0.03)):
        found = [getattr(layer, way) for layer in trace.layers]
        assert found == pytest.approx([0, 0, seconds + clock.oversleep, 0, 0])


def test_measuring_refuses_what_runs_behind_the_hosts_back():
    with pytest.raises(ValueError, match="on the CPU, and far is on meta"):
        measured(nn.Linear(2, 2, device="meta"), torch.zeros(1, 2), name="far", source="")
    with pytest.raises(ValueError, match="repeats is at least 1"):
        measured(nn.Linear(2, 2), torch.zeros(1, 2), name="none", source="", repeats=0)


def test_operations_of_a_billion_parameters_are_counted_without_memory():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(10_000, 10_000, bias=False) for _ in range(10)))
    trace = from_flops(model, torch.empty(4, 10_000), name="large", source="", samples_per_second=8)
    assert trace.elements == 10**9
    assert [layer.forward_seconds for layer in trace.layers] == pytest.approx([0.5 / 30] * 10)
    assert [layer.backward_seconds for layer in trace.layers] == pytest.approx([0.5 / 15] * 10)


def test_operations_that_cannot_be_counted_are_refused():
    with pytest.raises(ValueError, match="no floating-point operations"):
        from_flops(nn.ReLU(), torch.zeros(1, 2), name="relu", source="", samples_per_second=1)
    with pytest.raises(ValueError, match="samples_per_second is above 0, got 0"):
        from_flops(nn.Linear(2, 2), torch.zeros(1, 2), name="linear", source="", samples_per_second=0)


def trained(rank, world_size, ddp, options):
    """Seconds of each step of a wrapped model, and the gradients at the end, one step of them accumulated."""
    wrapped = ddp(emulated(TRACE), gradient_as_bucket_view=True, bucket_cap_mb=0.002, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    seconds = []
    for _ in range(4):
        torch.distributed.barrier()
        start = time.perf_counter()
        wrapped(INPUTS).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
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
        assert min(seconds[1:]) <= 2 * TRACE.seconds
    assert not torch.equal(first[1], second[1])  # ranks have gradients of their own,
    assert torch.equal(first[2], second[2])  # and their averages in common
    assert torch.equal(first[3], second[3])
    assert first[3].abs().sum() > 0


def test_the_command_measures_a_model_and_writes_a_trace_that_can_be_emulated(tmp_path, capsys):
    path = tmp_path / "mlp.json"
    assert main(["trace", "--model", "mlp", "--model.width", "16", "--threads", "1", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    trace = load_trace(str(path))
    model = build_model(ModelConfig("mlp", width=16))
    assert trace.parameters == shapes(emulated(trace)) == shapes(model)
    assert f"{trace.elements:,} parameters" in shown
    assert "source: measured on" in shown
    assert trace.seconds > 0


def test_the_command_shows_traces_and_shares_out_a_given_time(tmp_path, capsys):
    assert main(["trace", "resnet50@0.1", "--rows", "3"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 107 layers" in shown
    assert "scaled to 0.1 s a step by the user" in shown
    path = tmp_path / "resnet.json"
    assert main(["trace", "--model", "resnet18-cifar", "--seconds", "0.2", "--json", str(path)]) == 0
    trace, shipped = load_trace(str(path)), load_trace("resnet18-cifar@0.2")
    assert trace.parameters == shipped.parameters
    assert trace.forward_seconds == pytest.approx(shipped.forward_seconds)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["vgg"], "did you mean vgg19?"),
        (["vgg19", "--seconds", "1"], "for a trace write vgg19@1"),
        (["--seconds", "0"], "seconds is above 0, got 0"),
        (["--batch-size", "0"], "batch_size is at least 1, got 0"),
        (["--json", "/nowhere/a.json"], "json: there is no folder /nowhere"),
        (["--json", "."], "json: . is a folder; name a file, such as figures.json"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(arguments, words, capsys):
    assert main(["trace", *arguments]) == 2
    assert words in capsys.readouterr().err
