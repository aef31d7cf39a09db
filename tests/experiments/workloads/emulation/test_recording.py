import pytest
import torch
from torch import nn

from gradwire.experiments.workloads.emulation import (
    from_flops,
    measured,
)

from .given import shapes


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
