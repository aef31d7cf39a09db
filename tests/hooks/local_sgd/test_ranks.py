"""Local steps on the ranks of a process group, and on processes that are killed or stopped."""

import ctypes
import os
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from gradwire import LocalSteps

from ...ddp_core.errors import message_of
from ...ranks import LostRank
from . import sites
from .sites import GRACE, LIMIT, Town, descend, until

built = partial(sites.built, momentum=0.9)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained(rank, world_size, steps=8, states=None, **options):
    """Weights at the end, and the states of all parts."""
    model, optimizer, local = built(rank, **options)
    if states is not None:
        local.load_state_dict(states if isinstance(states, dict) else list(states))
    for step in range(steps):
        descend(model, optimizer, rank, step)
    state = local.state_dict()
    local.finish()
    return weights(model), state, local.waited


def held(state):
    """What a state holds back."""
    return {
        name: fields["residual"].clone()
        for fragment in state["fragments"]
        for name, fields in (fragment["memory"] if fragment else {}).items()
    }


def owed_by(rank, world_size, states):
    _, _, local = built(0, compressor="topk:ratio=0.2")
    local.load_state_dict(states)
    owed = {name: numbers for memory in local._rounds.memories.values() for name, numbers in memory.held_back().items()}
    local.close()
    return owed, local.round


def test_another_number_of_ranks_owes_the_mean_of_what_all_held_back(ranks):
    states = [state for _, state, _ in ranks.run(trained, 2, compressor="topk:ratio=0.2")]
    for owed, rounds in ranks.run(owed_by, 3, states):
        assert rounds == states[0]["round"]
        for name, numbers in owed.items():
            mean = sum(held(state)[name] for state in states) / 2
            torch.testing.assert_close(numbers, mean.reshape(-1))


def refused(rank, world_size):
    """What is said where something does not fit."""
    model, optimizer, local = built(0)
    state = local.state_dict()
    damaged = {**state, "parameters": {**state["parameters"], "last.bias": {"anchor": torch.full((3,), torch.nan)}}}
    wrong = [{}, 3, [], {**state, "setup": "other"}, damaged, [state, {**state, "round": 9}]]
    said = [message_of(local.load_state_dict, each) for each in wrong]
    local.close()
    wrong = [{"every": 2, "fragments": 3}, {"outer": "adam"}, {"compressor": "nothere"}, {"every": 4 + rank}]
    return [*said, *(message_of(LocalSteps, model, optimizer, **options) for options in wrong)]


def test_what_does_not_fit_is_refused_in_words(ranks):
    for said in ranks.run(refused, 2):
        expected = ["lacks", "no state", "empty", "saved with other", "momentum", "different rounds", "from 1 to every"]
        for words, message in zip([*expected, "nesterov or sgd", "nothere", "set up differently"], said, strict=True):
            assert words in message


def abandoned(rank, world_size):
    """The seconds that the first rank takes to abandon a round that no other has begun, and that its thread then lives."""
    model, optimizer, local = built(rank, every=1, fragments=1)
    seconds = []
    if rank == 0:
        descend(model, optimizer, rank, 0)
        for act in (local.abandon, lambda: until(lambda: not local._rounds._thread._threads.copy().pop().is_alive())):
            began = time.monotonic()
            act()
            seconds.append(time.monotonic() - began)
    dist.barrier()
    local.abandon()
    return seconds


def test_a_round_that_is_abandoned_does_not_hold_up_the_end_of_a_process(ranks):
    (wait, lived), _ = ranks.run(abandoned, 2)
    assert wait < 1
    assert lived < 10  # it looks once a second


def of_another_training(rank, world_size):
    """What ranks raise where the last one has loaded a state of another training, or of a later round."""
    said = []
    for change in ({"training": "3" * 16}, {"round": 900}):
        model, optimizer, local = built(rank, every=2, fragments=1, overlap=False)
        descend(model, optimizer, rank, 0)
        state = {**local.state_dict(), "round": 4, "training": "0" * 15 + "7"}
        local.load_state_dict({**state, **(change if rank == world_size - 1 else {})})
        said.append(message_of(descend, model, optimizer, rank, 1))
        local.close()
    return said


def test_ranks_with_states_of_different_trainings_or_rounds_are_refused_by_name(ranks):
    for other, later in ranks.run(of_another_training, 3):
        assert (
            "load states that all sites saved after one step of one training: rank 2: it is of training 3333" in other
        )
        assert "rank 2: it is at round 900, where the others are at 4" in later


def halt(kind, folder):
    """End this process, or pause it until it is woken: all of it, or Python alone, by a C call that keeps the GIL."""
    if kind == "hold":
        ctypes.PyDLL(None).open(bytes(folder / "held"), os.O_RDONLY)  # returns once somebody opens it for writing
    else:
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    (folder / "back").touch()


def wake(kind, folder, pid):
    if kind == "hold":
        (folder / "held").write_bytes(b"")
    until(lambda: (kind == "stop" and os.kill(pid, signal.SIGCONT)) or (folder / "back").exists())


def fatal(rank, world_size, address, kind, folder):
    """Sites of which the last one is killed, or paused while the others have rounds without it."""
    place, back, pids = Town.at(address, world_size, f"site {rank}", prefix=kind), folder / "back", [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    model, optimizer, local = built(rank, at=place, overlap=False)
    while local.round < 8 or local.history[-1].sites < (2 if kind == "kill" else 3):
        place.grace = GRACE if rank < 2 and local.steps >= 4 and not back.exists() else timedelta(seconds=LIMIT / 3)
        if rank == world_size - 1 and local.steps == 4:
            halt(kind, folder)
        if rank == 0 and kind != "kill" and local.steps == 12:
            wake(kind, folder, pids[-1])
        descend(model, optimizer, rank, local.steps)
    local.finish()
    torch.save((weights(model), [(stats.sites, stats.replaced) for stats in local.history]), folder / f"{rank}.pt")


@pytest.mark.parametrize("kind", ["kill", "stop", "hold"])
def test_when_a_site_is_killed_stopped_or_its_gil_held_the_others_go_on(ranks, kind, tmp_path):
    town = Town()
    os.mkfifo(tmp_path / "held")
    last = ranks.run(fatal, 3, town.address, kind, tmp_path, expect_errors=True)[-1]
    town.store.close()
    assert isinstance(last, LostRank) == (kind == "kill")
    ended = [torch.load(file) for file in sorted(tmp_path.glob("*.pt"))]  # the pool's own group has lost a rank
    assert len(ended) == (2 if kind == "kill" else 3)
    for given, _ in ended:
        for left, right in zip(given, ended[0][0], strict=True):
            assert torch.equal(left, right)
    assert {3, 2} <= {sites for sites, _ in ended[0][1]}
    assert kind == "kill" or any(replaced for _, replaced in ended[2][1][1:])  # it has taken the others' model


def dying(rank, world_size):
    """Ranks of a process group, of which one dies."""
    model, optimizer, local = built(rank, overlap=False)
    while local.round < 8:
        if rank == 1 and local.steps == 4:
            os._exit(3)
        descend(model, optimizer, rank, local.steps)


def test_ranks_of_a_process_group_fail_when_one_dies_and_name_it(ranks):
    first, dead, last = ranks.run(dying, 3, expect_errors=True)
    assert dead == LostRank(1, "died with exit code 3")
    assert "a round of LocalSteps failed, " in first.message
    assert all("rank 1 has ended" in each.message for each in (first, last))
