"""Another thread saves while sharded models train: it holds nothing up, changes nothing, and gets whole steps."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import gradwire
from gradwire.compress.protocol.requests import AllReduce, AllToAll
from gradwire.ddp_core.averaging import steps as stepping

from ..saving import Saves
from ..test_handle import same
from .given import given_model, gradients, mean_gradients, network
from .given import trained as train

STEPS = 4
SHARDED = {"gather": "int8", "reduce": "int4"}
CASES = [
    ((2,), SHARDED),
    ((2,), {"reduce": "onebit:error_feedback=1"}),
    ((2,), {"reduce": "int4:residual_bits=8"}),
    ((2, 1), {"replicas": "powersgd:rank=1", **SHARDED}),
    ((2, 2), {"replicas": "onebit:error_feedback=1", "reduce": "int8"}),
]


def attached(shape, arguments, undo=True):
    model = given_model(mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
    saves = Saves(waits=bool(undo))  # no save waits for the step that waits for it
    return model, gradwire.attach(model, transport=saves, undo=undo, **arguments), saves


def trained(rank, model, steps, after=lambda step: None):
    means = []
    for step in steps:
        means.append(mean_gradients(model, gradients(rank, step)))
        after(step)
    return means


def steps_of(state):
    """The step of a state, which that among replicas agrees with where both count."""
    (inside,) = state.values()
    counts = {inside["step"], inside.get("replicas", inside)["step"]} - {0}
    assert len(counts) <= 1, counts
    return max(counts, default=0)


def saved_within(rank, world_size, shape, arguments, undo):
    """Means without saves and with one before and after each request; the states after steps; what was saved."""
    model, handle, _ = attached(shape, arguments, undo)
    states = {0: handle.state_dict()}
    expected = trained(rank, model, range(STEPS), lambda step: states.update({step + 1: handle.state_dict()}))
    handle.close()
    model, handle, saves = attached(shape, arguments, undo)
    saves.save = handle.state_dict
    found = trained(rank, model, range(STEPS), lambda _: (saves.join(), saves.once()))
    saves.join()
    saves.save, last = None, handle.state_dict()
    handle.close()
    assert not saves.errors, saves.errors
    counted = {id(state): steps_of(state) for state in (*saves.results, last)}
    first = 2 if "replicas" in arguments else 0  # buckets are met in step 1: the fields move
    alike = [same(state, states[step]) for state in (*saves.results, last) if (step := counted[id(state)]) >= first]
    return same(found, expected), all(alike), set(counted.values())


@pytest.mark.parametrize(
    ("shape", "arguments", "undo"),
    [(*CASES[0], True), *((*each, False) for each in CASES[1:]), (*CASES[-1], True)],
    ids=str,
)
def test_a_thread_that_saves_anywhere_in_a_step_changes_no_bit_of_training_and_gets_whole_steps(
    ranks, shape, arguments, undo
):
    answers = ranks.run(saved_within, torch.Size(shape).numel(), shape, arguments, undo)
    first = 1 if shape[-1] == 1 else 0  # no weights are gathered, so the first request is of a step's first bucket
    for trained_alike, saved_alike, steps in answers:
        assert trained_alike
        assert saved_alike
        assert steps == set(range(first, STEPS + 1))


def changed_within(rank, world_size, shape, arguments):
    """What a handle holds back that another thread changed in the middle of a step; and as it should be."""
    answers = []
    for change in ("load", "rescale", "swap"):
        (model, handle, saves), (other, calm, _) = (attached(shape, arguments) for _ in range(2))
        trained(rank, model, range(1))
        trained(rank, other, range(1))
        states = handle.state_dict(), calm.state_dict()

        def act(handle, state, change=change):
            if change == "load":
                handle.load_state_dict(state)
            elif change == "rescale":
                handle.rescale(2.0)
            else:
                handle.swap(reduce="int8", gather="none")

        def once(handle=handle, state=states[0], saves=saves, act=act):
            saves.save = None
            act(handle, state)

        saves.save, saves.kinds = once, AllToAll  # that of the first gradients
        found = trained(rank, model, range(1, 2))
        expected = trained(rank, other, range(1, 2))
        act(calm, states[1])
        assert not saves.errors, saves.errors
        found += trained(rank, model, range(2, 4))
        expected += trained(rank, other, range(2, 4))
        answers.append((same(found, expected), same(handle.state_dict(), calm.state_dict())))
        handle.close()
        calm.close()
    return answers


@pytest.mark.parametrize(("shape", "arguments"), [CASES[0], CASES[-1]], ids=str)
def test_what_a_thread_changes_within_a_step_takes_effect_after_it(ranks, shape, arguments):
    for answers in ranks.run(changed_within, torch.Size(shape).numel(), shape, arguments):
        assert answers == [(True, True)] * 3


def caught_up(rank, world_size, shape, arguments, undo):
    """Whether means and states are alike where the loss scale doubles, and a save follows, after a step and within it."""
    answers = []
    for within in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.zeros(()))  # makes its scale
        model, handle, saves = attached(shape, arguments, undo)
        handle.follow(scaler)

        def save(scaler=scaler, handle=handle, saves=saves):
            saves.save = None
            scaler.update(4.0)
            return handle.state_dict()

        means = trained(rank, model, range(2))
        saves.save, saves.kinds = save if within else None, (AllReduce, AllToAll)  # that of the first gradients
        means += trained(rank, model, range(2, 3))
        saves.join()
        assert not saves.errors, saves.errors
        state = saves.results[0] if within else save()
        means += trained(rank, model, range(3, STEPS))
        answers.append((means, handle.state_dict(), state))
        handle.close()
    (quiet, *before), (found, *after) = answers
    return same(found, quiet), same(after[0], before[0]), same(after[1], before[1])


@pytest.mark.parametrize("undo", [True, False])
@pytest.mark.parametrize(("shape", "arguments"), [CASES[0], CASES[-1]], ids=str)
def test_residuals_follow_a_loss_scale_that_changes_within_a_step_once_the_step_has_ended(
    ranks, shape, arguments, undo
):
    for trained_alike, ended_alike, saved_alike in ranks.run(
        caught_up, torch.Size(shape).numel(), shape, arguments, undo
    ):
        assert trained_alike
        assert ended_alike
        assert saved_alike or undo  # with a copy of residuals the save is of the step before


def saved_asynchronously(rank, world_size, shape, arguments, folder):
    """Whether training beside `async_save` is as without, and goes on from each checkpoint as it went on then."""
    model, handle, _ = attached(shape, arguments)
    expected = trained(rank, model, range(STEPS))
    handle.close()
    model, handle, _ = attached(shape, arguments)
    beside, saving = dist.new_group(backend="gloo"), []

    def save(step):
        for each in saving:  # one at a time, as torch wants it
            each.result(60)
        state = {"compression": handle}
        saving.append(dcp.async_save(state, checkpoint_id=f"{folder}/{step}", process_group=beside))

    found = trained(rank, model, range(STEPS), save)
    for each in saving:
        each.result(60)
    handle.close()
    went_on = []
    for step in range(STEPS):
        model, handle, _ = attached(shape, arguments)
        dcp.load({"compression": handle}, checkpoint_id=f"{folder}/{step}", process_group=beside)
        went_on.append(same(trained(rank, model, range(step + 1, STEPS)), expected[step + 1 :]))
        handle.close()
    return same(found, expected), went_on


@pytest.mark.parametrize(("shape", "arguments"), [CASES[0], CASES[3]], ids=str)
def test_async_save_of_torch_holds_whole_steps_that_training_goes_on_from(ranks, shape, arguments, tmp_path):
    for alike, went_on in ranks.run(saved_asynchronously, 2, shape, arguments, str(tmp_path)):
        assert alike
        assert went_on == [True] * STEPS


def followed_by_a_save(rank, world_size):
    """How often a save had the stream that reads residuals wait for that of steps, as a GPU needs it."""
    model, handle, _ = attached((world_size, 1), {"replicas": "int8"})
    trained(rank, model, range(1))
    follows = []
    handle.replicas.averager.engines.follow = lambda: follows.append(1)
    handle.state_dict()
    handle.close()
    return len(follows)


def test_a_save_follows_the_stream_of_steps_where_gradwire_serves_replicas_alone(ranks):
    assert ranks.run(followed_by_a_save, 2) == [1, 1]


def interrupted(gradient):
    raise ArithmeticError("on purpose")


def saved_after_a_backward_that_broke_off(rank, world_size):
    """The steps in a state that another thread saves while gradients of a module are on their way that nobody awaits."""
    quiet, stepping.QUIET = stepping.QUIET, 0.3
    model = network(world_size)
    handle = gradwire.attach(model, reduce="int4")
    train(model, rank, 2)
    model[1].register_forward_hook(lambda module, inputs, outputs: outputs.register_hook(interrupted) and None)
    with pytest.raises(ArithmeticError):
        train(model, rank, 1)
    states = []
    thread = threading.Thread(target=lambda: states.append(handle.state_dict()), daemon=True)
    thread.start()
    thread.join(20)
    stepping.QUIET = quiet
    handle.close()
    return list(map(steps_of, states))


def test_a_save_waits_for_no_backward_that_broke_off(ranks):
    assert ranks.run(saved_after_a_backward_that_broke_off, 2) == [[2], [2]]
