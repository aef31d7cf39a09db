"""Of the states of all ranks as one, the mean of what was held back is kept, and each rank's is asked for once."""

import pytest
import torch

from gradwire.compress import Layout, Ranks, Simulation, compressor
from gradwire.compress.state.tree import Leaves, save
from gradwire.ddp_core.memory.checkpoint import merged, sealed

METHOD = compressor("topk:ratio=0.5")
NAMES = {torch.zeros(2, 3): "w", torch.zeros(4): "b"}


def state(rank, ranks, step=5):
    """What a rank saves that holds back its own number plus one of `w`, and owes twice that of `b`."""
    residual, owed = torch.full((2, 3), rank + 1.0), torch.full((4,), 2.0 * (rank + 1))
    parameters = {"w": {"residual": residual}, "b": {"residual": torch.zeros(4), "carried_over": owed}}
    return sealed({"step": step, "buckets": [["b", "w"]], "parameters": parameters}, METHOD, NAMES, Ranks(ranks, rank))


def test_the_mean_of_what_ranks_held_back_is_owed_in_whatever_order_their_states_come():
    whole = merged([state(2, 3), state(0, 3), state(1, 3)], METHOD, NAMES)
    assert whole["step"] == 5
    assert torch.equal(whole["parameters"]["w"]["carried_over"], torch.full((6,), 2.0))
    assert torch.equal(whole["parameters"]["b"]["carried_over"], torch.full((4,), 4.0))
    left = [fields["residual"] for fields in whole["parameters"].values() if "residual" in fields]
    assert not any(numbers.any() for numbers in left)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([state(0, 2)], "each of them once"),
        ([state(0, 2), state(0, 2)], "each of them once"),
        ([], "each of them once"),
        ([state(0, 2), state(1, 2, step=6)], r"saved after different steps: \[5, 6\]"),
        (state(0, 1), "takes a list of the states of all ranks, got dict"),
    ],
)
def test_states_that_are_not_those_of_all_ranks_after_one_step_are_refused(states, words):
    with pytest.raises(ValueError, match=words):
        merged(states, METHOD, NAMES)


@pytest.mark.parametrize("listed", [True, False])
def test_of_two_levels_too_the_mean_of_what_ranks_held_back_is_kept_whether_its_buckets_are_listed_or_not(listed):
    method = compressor("hosts+topk:ratio=0.1")
    layout = Layout(("b", "w"), ((40,), (3, 50)), torch.float32, torch.device("cpu"), Ranks(4, per_host=2))
    simulation = Simulation(method, layout)
    simulation.step([torch.randn(layout.numel, generator=torch.Generator().manual_seed(rank)) for rank in range(4)])
    names = {torch.zeros(40): "b", torch.zeros(3, 50): "w"}
    saved = [
        sealed(
            {"step": 1, "buckets": [["b", "w"]] * listed, "parameters": save(each), "ranks_per_host": 2},
            *(method, names, Ranks(4, rank)),
        )
        for rank, each in enumerate(simulation.states)
    ]
    held = [Leaves(each).held_back() for each in simulation.states]
    for name, fields in merged(saved, method, names)["parameters"].items():
        expected = sum(each[name] for each in held if name in each) / 4
        torch.testing.assert_close(fields["carried_over"], expected)
