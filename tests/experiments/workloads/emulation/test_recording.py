import pytest
import torch
from torch import nn

from gradwire.experiments.workloads.emulation import from_flops

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


def test_a_trace_by_operations_has_all_parameters_of_a_model_and_time_where_there_are_operations():
    model = Pair()
    trace = from_flops(model, torch.randn(16, 12, 8), name="pair", source="here", samples_per_second=160)
    names = [layer.name for layer in trace.layers]
    assert trace.parameters.items() == shapes(model).items()
    assert names.index("attention") < names.index("twice") < names.index("out")
    attention = trace.layers[names.index("attention")].parameters
    assert attention.keys() == {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    assert all(layer.forward_seconds > 0 for layer in trace.layers if layer.name in ("attention", "twice", "out"))
    assert trace.batch_size == 16
    assert trace.seconds == pytest.approx(0.1)


def test_operations_that_cannot_be_counted_are_refused():
    with pytest.raises(ValueError, match="no floating-point operations"):
        from_flops(nn.ReLU(), torch.zeros(1, 2), name="relu", source="", samples_per_second=1)
    with pytest.raises(ValueError, match="samples_per_second is above 0, got 0"):
        from_flops(nn.Linear(2, 2), torch.zeros(1, 2), name="linear", source="", samples_per_second=0)
