"""What a model tells of itself under torch's names: of which steps there are samples, and what times they have."""

import time

import pytest
import torch
from torch import nn

import gradwire
from gradwire.ddp_core.measure.timeline import BucketTimes, StepTimes
from gradwire.ddp_core.torch_compat.reducer_and_logger import ALWAYS_SAMPLED, timed

DURATIONS = ("forward_compute_time", "backward_compute_time", "backward_comm_time")


@pytest.fixture
def model(group):
    made = gradwire.DistributedDataParallel(nn.Linear(3, 2), bucket_cap_mb=1)
    yield made
    made.compression.close()


def stepped(model):
    """What is logged of the steps before, in the forward of a further one."""
    output = model(torch.ones(1, 3))
    logged = model._get_ddp_logging_data()
    output.sum().backward()
    return logged


def test_a_model_is_described_at_its_construction(model):
    data = model._get_ddp_logging_data()
    texts = ("module_name", "dtypes", "bucket_sizes")
    assert [data[name] for name in texts] == ["Linear", "float", str(4 * (3 * 2 + 2))]
    numbers = ("num_parameter_tensors", "total_parameter_size_bytes", "bucket_cap_bytes", "world_size", "iteration")
    assert [data[name] for name in numbers] == [2, 32, 1024 * 1024, 1, 0]
    assert "can_set_static_graph" not in data


def test_the_first_steps_are_sampled_and_then_one_in_many(model):
    model._set_ddp_runtime_logging_sample_rate(4)
    seen = [stepped(model)["iteration"] for _ in range(14)]
    assert seen == [*range(ALWAYS_SAMPLED + 1), ALWAYS_SAMPLED, 12, 12]


def test_averages_are_over_the_samples(model):
    samples = [stepped(model) for _ in range(4)][1:]
    for name in DURATIONS:
        mean = sum(sample[name] for sample in samples) / 3
        assert samples[-1][f"avg_{name}"] == pytest.approx(mean, abs=3)  # each one is cut to whole nanoseconds


def test_communication_is_from_the_first_bucket_s_leave_to_the_last_average():
    buckets = (BucketTimes(0, ("b",), 2.0, 2.5, 4.0), BucketTimes(1, ("a",), 3.0, 3.0, 6.0))
    step = StepTimes(1, time.perf_counter(), forward=1.0, backward=4.0, exposed=1.0, buckets=buckets)
    durations, moments = timed(step)
    assert list(durations.values()) == [1.0, 4.0, 3.5, 2.5]
    assert list(moments.values()) == [0.0, 1.0, 2.5, 5.0, 6.0]
    nothing = StepTimes(1, 0.0, forward=1.0, backward=4.0, exposed=0.0, buckets=())
    assert timed(nothing)[0]["backward_comm_time"] == 0.0


def test_a_step_without_a_bucket_has_a_nanosecond_of_communication(model):
    model.logger._add(StepTimes(1, 0.0, forward=1.0, backward=4.0, exposed=0.0, buckets=()))
    assert model._get_ddp_logging_data()["backward_comm_time"] == 1  # as torch's
