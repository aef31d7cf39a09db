"""States, under every wrapper: what is held back comes back, to the bit or as the mean, whatever lies between."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import gradwire

from ...ddp_core.errors import logged
from ..fsdp.given import GivenParts
from ..given import same, through_file
from .wrappers import EVERY, HOSTS, WHOLE, WRAPPERS, Training, added, alike, counted, held, means, of_rank, over

STEPS = 3  # before a save
MORE = {  # specifications that do not bring back all that they are given, or round it
    "attach": ["bf16", "int4:start_iter=3,warmup=int8", "int4:start_iter=4,warmup=int8"],  # a warm-up over at the save
    "own": ["topk:ratio=0.1,error_feedback=0.8,momentum=0.9"],
    "FSDP2": ["int4:residual_bits=8", "int2"],
}


def trained(wrapper, spec=None, **options):
    training = Training(wrapper, spec, **options)
    training.steps(0, STEPS)
    return training


def by_file(old, new, folder):
    new.handle.load_state_dict(through_file(old.handle.state_dict()))


def with_gradients(old, new, folder):
    """A state whose numbers require gradients."""
    state = old.handle.state_dict()
    for numbers in (numbers for fields in held(state).values() for numbers in fields.values()):
        numbers.requires_grad_(numbers.is_floating_point())
    new.handle.load_state_dict(state)


def by_checkpoint(old, new, folder):
    """torch's, of the states of all ranks."""
    states = [gradwire.GatheredState(each.handle) if old.wrapper in WHOLE else each.handle for each in (old, new)]
    dcp.save({"compression": states[0]}, checkpoint_id=folder)
    dcp.load({"compression": states[1]}, checkpoint_id=folder)


def by_rank(old, new, folder):
    """torch's, of each rank's state under a key of its own, as one value where it is kept by bucket."""
    key, packed = f"compression-{old.rank}", io.BytesIO()
    torch.save(old.handle.state_dict(), packed)
    dcp.save({key: packed.getvalue()}, checkpoint_id=folder)
    dcp.load(state := {key: b""}, checkpoint_id=folder)
    new.handle.load_state_dict(torch.load(io.BytesIO(state[key]), weights_only=True))


def gathered(old, new, folder):
    """Through a file that rank 0 alone writes."""
    state = through_file(old.handle.gather_state_dict())
    new.handle.scatter_state_dict(state if old.rank == 0 else {})


WAYS = [by_file, with_gradients, by_checkpoint, by_rank, gathered]


def went_on(rank, world_size, wrapper, folder):
    """{(specification, way): whether state, names and steps after a load are those of a training that never stopped}."""
    found = {}
    for place, spec in enumerate((*EVERY[wrapper].specs, *MORE.get(wrapper, ()))):
        old, trainings = trained(wrapper, spec), []
        ways = WAYS[: None if wrapper in WHOLE else 2 if wrapper in HOSTS else -1]
        if place:  # one way each
            ways = [ways[place % len(ways)]]
        for way in ways:
            new = Training(wrapper, spec)
            way(old, new, f"{folder}/{spec}-{way.__name__}")
            found[spec, way.__name__] = alike(old.handle.state_dict(), new.handle.state_dict())
            trainings.append(new)
        names = {name for _, name in held(old.handle.state_dict())}
        found[spec, "names"] = names == {name for name, _ in old.parameters()} or spec == "bf16" or wrapper in HOSTS
        found[spec, "step"] = counted(old.handle.state_dict()) == STEPS
        expected = old.steps(STEPS, STEPS + 3)
        for way, new in zip(ways, trainings, strict=True):
            found[spec, way.__name__] &= same(new.steps(STEPS, STEPS + 3), expected)
            new.close()
        old.close()
    return found


@over(*WRAPPERS, *HOSTS)
def test_a_loaded_state_goes_on_to_the_bit(ranks, wrapper, tmp_path):
    for found in ranks.run(went_on, EVERY[wrapper].world_size, wrapper, str(tmp_path)):
        assert all(found.values()), found


def went_on_with_another(rank, world_size, wrapper):
    """{specification: whether it goes on from the step of a state of int8, and rank 0 says so, as where none was loaded}."""
    old, found = trained(wrapper, "int8"), {}
    for spec in ("none", "bf16"):
        new, fresh = Training(wrapper, spec), Training(wrapper, spec)
        with logged(f"continues with {spec}") as warned:
            new.handle.load_state_dict(old.handle.state_dict())
        found[spec] = counted(new.handle.state_dict()) == STEPS
        found[spec] &= bool(warned) == (rank == 0)
        found[spec] &= same(new.steps(STEPS, STEPS + 2), fresh.steps(STEPS, STEPS + 2))
        new.close()
        fresh.close()
    old.close()
    return found


@over("attach", "own", "replicate", "FSDP2", "replicas")
def test_a_state_that_holds_nothing_back_is_loaded_under_another_compressor(ranks, wrapper):
    for found in ranks.run(went_on_with_another, EVERY[wrapper].world_size, wrapper):
        assert found == {"none": True, "bf16": True}


def saved(rank, world_size, wrapper, spec):
    """A state, and all that is held back then."""
    training = trained(wrapper, spec)
    state, owed = training.handle.state_dict(), training.owed()
    training.close()
    return state, owed


def resized(rank, world_size, wrapper, spec, states):
    """All that comes back of the states of other ranks, at once; and after a step of a resumed training, with that step."""
    found, kept = [], None
    for at_once in (True, False):
        training = Training(wrapper, spec)
        training.handle.load_state_dict(states if at_once else kept, resize=at_once)
        kept = training.handle.state_dict()
        averages = [] if at_once else [training.step(7)]
        found.append(added(*averages, training.owed()))
        training.close()
    return *found, counted(kept)


OTHERS = [  # wrappers and numbers of ranks, before and after
    ("attach", 2, "attach", 3),
    ("own", 3, "own", 2),
    ("own", 2, "replicate", 2),
    ("replicate", 3, "comm_hook", 1),
    ("comm_hook", 1, "replicate", 2),
    ("FSDP2", 3, "FSDP2", 2),
    ("HSDP by torch", 4, "replicas", 2),
    ("replicas", 2, "HSDP by torch", 4),
    ("HSDP", 4, "HSDP", 3),
    ("own, hosts", 4, "own, hosts", 2),
]
SPECS = {
    "FSDP2": ["int4"],
    "HSDP": ["onebit:error_feedback=1"],
    "HSDP by torch": ["topk:ratio=0.05"],
    "replicas": ["powersgd:rank=1"],
    **{name: each.specs for name, each in HOSTS.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "ranks_before", "after", "ranks_after"),
    [pytest.param(*case, marks=[*EVERY[case[0]].marks, *EVERY[case[2]].marks]) for case in OTHERS],
)
def test_the_mean_of_what_is_held_back_stays_on_other_ranks_and_under_another_wrapper(
    ranks, before, ranks_before, after, ranks_after
):
    for spec in SPECS.get(before, ["topk:ratio=0.05", "powersgd:rank=1,start_iter=2"]):
        old = ranks.run(saved, ranks_before, before, spec)
        states, owed = [state for state, _ in reversed(old)], old[0][1]
        assert max(numbers.abs().max() for numbers in owed.values()) > 0.01
        exact = added(owed, means([7], ranks_after))
        for at_once, after_a_step, step in ranks.run(resized, ranks_after, after, spec, states):
            assert step == STEPS
            torch.testing.assert_close(at_once, added(owed), rtol=0, atol=1e-4)
            torch.testing.assert_close(after_a_step, exact, rtol=0, atol=1e-4)


def swapped(rank, world_size, wrapper, detours):
    """All that averages brought, before and after what was held back; the sums of what they stand for."""
    specs = [*EVERY[wrapper].specs, *reversed(EVERY[wrapper].specs)]
    training, averages = Training(wrapper), []
    training.swap(specs[0])  # before the first step there is nothing to lose
    for phase, spec in enumerate(specs):
        for each in (*detours, spec):
            training.swap(each)
        state = training.handle.state_dict()
        if phase == 1:  # a state of just after a swap
            training.close()
            training = Training(wrapper, spec)
            training.handle.load_state_dict(state)
        averages += training.steps(2 * phase, 2 * phase + 2)
    if not detours:
        training.handle.load_state_dict(training.handle.state_dict())  # a swap follows at once
    result = added(*averages), added(*averages, training.owed()), means(range(2 * len(specs)), world_size)
    training.close()
    return result


@over(*WRAPPERS, *HOSTS)
def test_swaps_lose_nothing_whether_the_state_is_saved_or_loaded_or_swapped_again_in_between(ranks, wrapper):
    detours = ("int4", "none") if wrapper in ("own", "replicate", "HSDP") else ()
    answers = ranks.run(swapped, EVERY[wrapper].world_size, wrapper, detours)
    for before, total, expected in answers:
        assert all(torch.equal(each, answers[0][1][name]) for name, each in total.items())
        torch.testing.assert_close(total, expected, rtol=0, atol=2e-4)
        assert max((before[name] - each).abs().max() for name, each in expected.items()) > 0.01


def rescaled(rank, world_size, wrapper):
    """What comes out after a swap to another compressor and a change of the loss scale; and without these."""
    found = []
    for factor in (1.0, 0.25):
        training = trained(wrapper)
        if factor != 1.0:
            training.swap(WRAPPERS[wrapper].specs[-1])
            training.handle.rescale(factor)
        found.append(training.owed())
        training.close()
    return found


@over()
def test_what_a_swap_left_over_can_be_rescaled(ranks, wrapper):
    for owed, quarter in ranks.run(rescaled, WRAPPERS[wrapper].world_size, wrapper):
        for name, numbers in owed.items():
            torch.testing.assert_close(quarter[name], 0.25 * numbers, rtol=1e-5, atol=1e-6)


def twin(training, way):
    """The handle of a copied model, or a copied handle where models cannot be copied with theirs."""
    if training.wrapper == "own":
        return way(training.model).compression
    return way(training.model)._comm_hooks[0][1] if training.wrapper == "attach" else way(training.handle)


def copied(rank, world_size, wrapper):
    """Whether handles that are copied and pickled hold what their origin holds, and stay apart from it."""
    training = trained(wrapper)
    twins = [twin(training, way) for way in (lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy)]
    found = [alike(training.handle.state_dict(), each.state_dict()) for each in twins]
    training.step(STEPS)
    found += [not alike(training.handle.state_dict(), each.state_dict()) for each in twins]
    for each in (training, *twins):
        each.close()
    return found


@over(*WHOLE)
def test_a_copied_handle_holds_the_same_and_is_another_one(ranks, wrapper):
    assert ranks.run(copied, 2, wrapper) == [[True] * 4] * 2


FROZEN = ("parts.0.p1", "parts.1.p0", "parts.1.p1")  # a part of a module, and a module


def frozen():
    model = GivenParts()
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


def frozen_since(rank, world_size, wrapper, spec, resize):
    """What is held back when parameters are frozen, and what comes of it; the names in the state then; what was logged."""
    old = trained(wrapper, spec)
    state, states = old.handle.state_dict(), [None] * world_size
    dist.all_gather_object(states, state)
    owed = old.owed()
    old.close()
    new = Training(wrapper, spec, frozen())
    with logged("frozen") as lines:
        new.handle.load_state_dict(states if resize else state, resize=resize)
    names = {name for _, name in held(new.handle.state_dict())}
    of_rank(state)["parameters"]["other"] = {"residual": torch.zeros(3)}
    with pytest.raises(ValueError, match="other"):
        new.handle.load_state_dict(state)
    came = new.owed()
    new.close()
    return owed, came, names, lines


@over()
def test_of_a_state_from_before_parameters_were_frozen_the_rest_is_loaded_and_a_warning_names_them(ranks, wrapper):
    resize = wrapper in ("own", "replicate", "FSDP2")
    specs = [spec for spec in WRAPPERS[wrapper].specs if "batched" not in spec]  # whose state is of buckets
    for spec in (*specs, *(["dgc:ratio=0.1"] if wrapper == "own" else [])):
        answers = ranks.run(frozen_since, WRAPPERS[wrapper].world_size, wrapper, spec, resize)
        for rank, (owed, came, names, told) in enumerate(answers):
            assert came.keys() == owed.keys() - set(FROZEN)
            torch.testing.assert_close(came, {name: owed[name] for name in came}, rtol=1e-5, atol=1e-5)
            assert came["parts.0.p0"].abs().max() > 0.01
            assert names.isdisjoint(FROZEN)
            assert all(", ".join(FROZEN) in line for line in told)
            assert told or rank > 0
            assert wrapper not in WHOLE or bool(told) == (rank == 0 or resize)


def frozen_later(rank, world_size, wrapper):
    """The averages after parameters were frozen under the wrapper; whether what else a state holds is loaded then."""
    training = trained(wrapper)
    state = training.handle.state_dict()
    for name, parameter in training.parameters():
        parameter.requires_grad_(name not in FROZEN)
    averages = training.step(STEPS)
    training.handle.load_state_dict(state)
    after, before = held(training.handle.state_dict()), held(state)
    loaded = [same(before[kind, name], after[kind, name]) for kind, name in before if name not in FROZEN]
    names = {name for _, name in after}
    training.close()
    return set(averages), all(loaded), names


@over("replicate", "FSDP2", "HSDP")
def test_parameters_may_be_frozen_between_steps_and_a_state_from_before_is_loaded_without_them(ranks, wrapper):
    for averaged, loaded, names in ranks.run(frozen_later, WRAPPERS[wrapper].world_size, wrapper):
        assert averaged == {"parts.0.p0"}
        assert loaded
        assert wrapper != "replicate" or names.isdisjoint(FROZEN)
