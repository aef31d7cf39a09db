"""What compressors declare holds for those that contain them; a compressor from elsewhere declares it in the same way."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gradwire.compress import (
    Adaptive,
    Compressor,
    Dense,
    ErrorFeedback,
    Float16,
    Gathered,
    Hierarchical,
    Partition,
    PowerSGD,
    Switch,
    TopK,
    Traits,
    WorkerMomentum,
    all_reduce,
    compressor,
    register,
    traits_of,
    with_traits,
)
from gradwire.compress.protocol import registry
from gradwire.ddp_core.memory.model_memory import ModelMemory


@pytest.fixture(autouse=True)
def private_registry():
    before = dict(registry.registered)
    yield
    registry.registered.clear()
    registry.registered.update(before)


def test_bytes_of_one_stage_or_group_count_and_shapes_of_any():
    assert traits_of(Switch({0: Dense(), 3: Gathered(TopK())})).packs_bytes
    assert not traits_of(Switch({0: Dense(), 3: PowerSGD()})).ignores_shapes
    assert traits_of(ErrorFeedback(WorkerMomentum(Dense()))).needs_all_parameters
    assert not traits_of(ErrorFeedback(Dense())).averages


@register(
    "every-third", lossy=False, traits=Traits(needs_all_parameters=True, extra_rounds_in=lambda step: step % 3 == 2)
)
@dataclass(frozen=True)
class EveryThird:
    """The mean, and in every third step a round of one number more."""

    def init(self, layout) -> list[int]:
        return [0]

    def reduce(self, grad, state, residual=None):
        state[0] += 1
        if state[0] % 3 == 0:
            yield from all_reduce(torch.zeros(1))
        return (yield from all_reduce(grad))


del registry.registered["every-third"]  # other tests list all compressors


@with_traits(lambda each: Traits(packs_bytes=each.packs))
@dataclass(frozen=True)
class Around:
    """A wrapper of others, not registered: its traits depend on its options."""

    inner: Compressor
    packs: bool = False

    def init(self, layout) -> Any:
        return self.inner.init(layout)

    def reduce(self, grad, state, residual=None):
        return (yield from self.inner.reduce(grad, state, residual))


class TestFromElsewhere:
    def test_its_traits_count_inside_a_wrapper_that_declares_others(self):
        found = traits_of(Around(EveryThird(), packs=True))
        assert found.needs_all_parameters
        assert found.packs_bytes
        with pytest.raises(ValueError, match="Around packs its own bytes"):
            Float16(Around(Dense(), packs=True))
        assert Float16(Around(Dense())).inner == Around(Dense())

    def test_a_model_with_unused_parameters_is_refused(self):
        with pytest.raises(ValueError, match="needs the gradients of all parameters"):
            ModelMemory(Around(EveryThird()), partial=True)

    def test_two_levels_and_ladders_refuse_what_two_levels_or_ladders_cannot_contain(self):
        for within in (Float16, Around):
            with pytest.raises(ValueError, match=r"there are two levels, hosts and their ranks: write hosts\+ once"):
                Hierarchical(within(Hierarchical(Dense())))
        register("every-third", lossy=False)(EveryThird)
        with pytest.raises(ValueError, match="ladder cannot take"):
            Adaptive("none/every-third")


REFUSED = {
    "codec's shapes": ({"adapter": Gathered, "traits": Traits(ignores_shapes=True)}, "adapter declares ignores_shapes"),
    "compressor's zeros": ({"traits": Traits(keeps_zeros=True, draws=True)}, "only codecs have draws, keeps_zeros"),
    "a lossy mean": ({"traits": Traits(averages=True)}, "register it with lossy=False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_traits_that_contradict_the_registration_are_refused(case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        register("made", **options)(EveryThird)


def test_traits_are_traits_or_a_function():
    with pytest.raises(TypeError, match=r"traits are gradwire.compress.Traits\(...\) or a function"):
        with_traits({"averages": True})(EveryThird)


def test_names_count_where_parameters_are_told_apart_or_dealt_by_them():
    specs = ("int4", "hosts:ranks=2+int4", "hosts:ranks=2+powersgd")
    assert [traits_of(compressor(spec)).by_name for spec in specs] == [False, False, True]
    assert traits_of(ErrorFeedback(Partition((("*.bias", Dense()),)))).by_name
