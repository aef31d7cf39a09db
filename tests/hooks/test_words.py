"""What users are shown: specifications as they wrote them, steps that go on counting, the name that they meant."""

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import Given, average, gradients

SHAPES = ((40, 30), (40,))


def counted(rank, world_size):
    """Steps by the statistics before a save, after the load and after a step."""
    models = [TorchDDP(Given(SHAPES)) for _ in range(2)]
    first, second = (gradwire.attach(model, "topk") for model in models)
    for step in range(3):
        average(models[0], gradients(rank, step, SHAPES))
    second.load_state_dict(first.state_dict())
    counts = [first.stats().steps, second.stats().steps]
    average(models[1], gradients(rank, 3, SHAPES))
    return [*counts, second.stats().steps, second.stats().total.traffic.rounds]


def test_steps_before_a_checkpoint_count(ranks):
    assert ranks.run(counted, 2) == [[3, 3, 4, 1]] * 2


def test_attach_and_comm_hook_name_the_nearest_argument_too():
    for function in (gradwire.attach, gradwire.comm_hook):
        with pytest.raises(
            TypeError, match=rf"{function.__name__} has no argument 'time_out' \(did you mean 'timeout'"
        ):
            function("topk", time_out=None)
    with pytest.raises(
        ValueError, match=r"'topk' has no option 'ration' \(did you mean 'ratio=0.1'\?\); it has: ratio"
    ):
        gradwire.compressor("topk:ration=0.1")
