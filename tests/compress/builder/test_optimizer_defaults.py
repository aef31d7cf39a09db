"""What compression and an optimizer have to know of each other."""

import warnings

import pytest
import torch
from torch import nn

from gradwire.compress import Dense, Simulation, compressor, specification, tuned, without_momentum
from gradwire.compress.builder.optimizer_defaults import FEEDBACK, kinds, own_momentum

from ..given import gradients, layout, mean

MAKE = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "AdamW": lambda p: torch.optim.AdamW(p, betas=(0.95, 0.99)),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}
HAVE_MOMENTUM = ["SGD with momentum", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"]


def made(name):
    return MAKE[name]([nn.Parameter(torch.zeros(4, 3))])


def matrices(count):
    return [nn.Parameter(torch.zeros(4, 3)) for _ in range(count)]


def named(name, *groups):
    """An optimizer of another package, as far as gradwire looks at it."""
    return type(name, (torch.optim.Optimizer,), {})(list(groups), {})


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def steps(optimizer, count=5):
    """The weights after steps with the same gradients."""
    (weight,) = optimizer.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weight.detach().clone()


class TestWithoutMomentum:
    @pytest.mark.parametrize("name", HAVE_MOMENTUM)
    def test_it_is_the_optimizer_itself_and_has_none_any_more_also_in_groups_to_come(self, name):
        optimizer = made(name)
        assert own_momentum(optimizer) > 0
        assert without_momentum(optimizer) is optimizer
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert own_momentum(optimizer) == 0
        assert steps(optimizer).isfinite().all()

    def test_it_then_steps_as_one_that_was_made_without(self):
        pairs = [
            ("SGD with momentum", lambda p: torch.optim.SGD(p, 0.1)),
            ("AdamW", lambda p: torch.optim.AdamW(p, betas=(0.0, 0.99))),
            ("RMSprop", torch.optim.RMSprop),
        ]
        for name, make in pairs:
            other = make([nn.Parameter(torch.zeros(4, 3))])
            assert torch.equal(steps(without_momentum(made(name))), steps(other))

    def test_with_worker_momentum_and_no_compression_weights_are_those_of_the_optimizer_s_own(self):
        within, weights = layout((4, 3)), [nn.Parameter(torch.zeros(4, 3)) for _ in range(2)]
        own = torch.optim.SGD([weights[0]], 0.1, momentum=0.9)
        other = without_momentum(torch.optim.SGD([weights[1]], 0.1, momentum=0.9))
        simulation = Simulation(compressor({"name": "topk", "ratio": 1, "momentum": 0.9}), within)
        for step in range(6):
            given = gradients(within, step)
            weights[0].grad = mean(given).view(4, 3)
            weights[1].grad = simulation.step(given)[0].view(4, 3)
            own.step()
            other.step()
        assert torch.allclose(*weights, atol=1e-5)

    def test_what_is_around_another_optimizer_is_looked_into(self):
        class Around(torch.optim.Optimizer):
            def __init__(self, optimizer):
                self.optimizer = optimizer

            param_groups = property(lambda self: self.optimizer.param_groups)
            defaults = property(lambda self: self.optimizer.defaults)

        optimizer = made("AdamW")
        without_momentum(Around(optimizer))
        assert own_momentum(optimizer) == 0
        assert optimizer.param_groups[0]["betas"] == (0.0, 0.99)

    @needs_muon
    def test_of_several_each_loses_its_own(self):
        several = [torch.optim.Muon(matrices(1)), made("AdamW")]
        assert without_momentum(several) is several
        assert own_momentum(several) == 0
        plain = torch.optim.Muon(matrices(1), momentum=0.0, nesterov=False)
        assert torch.equal(steps(several[0]), steps(plain))

    @pytest.mark.parametrize("name", ["Adagrad", "ASGD", "Rprop"])
    def test_others_are_refused_by_name(self, name):
        with pytest.raises(TypeError, match=f"knows SGD, Adam.*not {name}: make it without momentum yourself"):
            without_momentum(made(name))


class TestKind:
    KINDS = (
        dict.fromkeys(MAKE, "Adam")
        | {"SGD with momentum": "SGD with momentum"}
        | dict.fromkeys(["SGD", "ASGD", "Rprop"], "SGD")
    )

    @pytest.mark.parametrize("name", MAKE)
    def test_it_is_told_by_what_an_optimizer_does(self, name):
        assert kinds(made(name)) == {self.KINDS[name]}

    def test_an_adam_without_momentum_is_one_still(self):
        assert kinds(without_momentum(made("AdamW"))) == {"Adam"}
        assert kinds(without_momentum(made("SGD with momentum"))) == {"SGD"}

    @pytest.mark.parametrize("name", ["Muon", "NorMuon", "Dion", "Dion2", "SingleDeviceMuonWithAuxAdam"])
    def test_optimizers_of_other_packages_that_orthonormalise_are_told_by_their_names(self, name):
        optimizer = named(name, {"params": matrices(1), "mu": 0.95, "algorithm": name.lower()})
        assert kinds(optimizer) == {"Muon"}
        assert own_momentum(optimizer) == 0.95

    def test_one_of_another_name_is_told_by_a_mark_in_its_groups(self):
        group = {"params": matrices(1), "momentum": 0.95}
        assert kinds(named("Polar", group)) == {"SGD with momentum"}
        assert kinds(named("Polar", {**group, "use_muon": True})) == {"Muon"}

    @pytest.mark.parametrize("beside", [{"algorithm": "adamw"}, {"algorithm": "lion"}, {"use_muon": False}])
    def test_a_group_that_such_an_optimizer_leaves_to_adam_is_of_adam(self, beside):
        own = {"params": matrices(1), "momentum": 0.95, "use_muon": True}
        assert kinds(named("Muon", own, {"params": matrices(1), **beside})) == {"Muon", "Adam"}

    @needs_muon
    def test_of_several_those_count_that_have_matrices(self):
        muon = torch.optim.Muon(matrices(2))
        vectors, tables = [nn.Parameter(torch.zeros(4))], matrices(1)
        assert kinds([muon, torch.optim.AdamW(vectors)]) == {"Muon"}
        assert kinds((muon, torch.optim.AdamW(tables))) == {"Muon", "Adam"}
        assert kinds([torch.optim.SGD(vectors, 0.1), torch.optim.AdamW(vectors)]) == {"SGD", "Adam"}  # no matrices


@pytest.fixture
def table(monkeypatch):
    """Defaults that no study will change."""
    rows = {"topk": 0.5, "powersgd": 0.25, "ternary": 0.0}
    monkeypatch.setattr("gradwire.compress.builder.optimizer_defaults.FEEDBACK", {"Adam": rows})


TUNED = {
    "topk": "topk:error_feedback=0.5",
    "topk:ratio=0.1": "topk:ratio=0.1,error_feedback=0.5",
    "topk:error_feedback=0.9": "topk:error_feedback=0.9",
    "topk:error_feedback=1": "topk",
    "topk:error_feedback=false": "topk:error_feedback=false",
    "fp16+powersgd:rank=2": "fp16+powersgd:rank=2,error_feedback=0.25",
    "powersgd:start_iter=9,warmup=bf16": "powersgd:error_feedback=0.25,start_iter=9,warmup=bf16",
    "int4": "int4",
    "ternary:block=8": "ternary:block=8,error_feedback=false",
    "ternary:residual_bits=8": "ternary:residual_bits=8",
    "ternary:error_feedback=true": "ternary",
    "none": "none",
}


@pytest.mark.usefixtures("table")
class TestTuned:
    @pytest.mark.parametrize("spec", TUNED)
    def test_options_that_are_not_given_are_those_of_the_table(self, spec):
        assert specification(compressor(tuned(spec, made("AdamW")))) == TUNED[spec]

    @pytest.mark.parametrize("spec", TUNED)
    def test_without_an_optimizer_or_with_one_that_has_no_row_a_specification_stays(self, spec):
        assert tuned(spec, None) is spec
        assert tuned(spec, made("SGD")) is spec

    def test_a_mapping_is_filled_and_left_as_it_is(self):
        given = {"name": "bf16", "inner": {"name": "powersgd", "rank": 2}}
        assert specification(compressor(tuned(given, made("Adam")))) == "bf16+powersgd:rank=2,error_feedback=0.25"
        assert given == {"name": "bf16", "inner": {"name": "powersgd", "rank": 2}}

    @pytest.mark.parametrize(
        "thing", ["adam", torch.optim.Adam, nn.Linear(1, 1), 3, [], ["adam"], [made("SGD"), None]], ids=str
    )
    def test_what_is_no_optimizer_is_refused(self, thing):
        with pytest.raises(TypeError, match=r"optimizer is a torch\.optim\.Optimizer, or a list of several; got "):
            tuned("topk", thing)

    def test_two_momenta_are_warned_of_with_the_way_out_and_one_is_not(self):
        optimizer = made("AdamW")
        with pytest.warns(
            UserWarning, match=r"momentum of 0\.9, and AdamW has one of 0\.95.*without_momentum\(optimizer\)"
        ):
            tuned("topk:momentum=0.9", optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tuned("topk", optimizer)
            tuned("fp16+powersgd:momentum=0.9", without_momentum(optimizer))
            tuned(Dense(), optimizer)


def test_every_row_of_the_table_is_of_a_method_and_of_another_value_than_its_own():
    for rows in FEEDBACK.values():
        for name, kept in rows.items():
            assert compressor({"name": name, "error_feedback": kept}) != compressor(name)


class TestOfSeveral:
    @pytest.fixture(autouse=True)
    def table(self, monkeypatch):
        rows = {
            "Adam": {"topk": 0.9, "int4": 0.0},
            "Muon": {"topk": 0.7},
            "SGD with momentum": {"topk": 0.8, "powersgd": 0.9},
        }
        monkeypatch.setattr("gradwire.compress.builder.optimizer_defaults.FEEDBACK", rows)

    def muon(self):
        return named("Muon", {"params": matrices(1), "momentum": 0.95})

    @pytest.mark.parametrize(
        ("others", "topk", "powersgd"),
        [((), 0.7, 1.0), (("AdamW",), 0.7, 1.0), (("SGD with momentum",), 0.7, 0.9), (("AdamW", "SGD"), 0.7, 1.0)],
        ids=str,
    )
    def test_the_smallest_feedback_of_those_with_matrices_is_chosen(self, others, topk, powersgd):
        several = [self.muon(), *map(made, others)]
        assert compressor(tuned("topk", several)) == compressor(f"topk:error_feedback={topk}")
        assert compressor(tuned("powersgd", several)) == compressor(f"powersgd:error_feedback={powersgd}")

    def test_error_feedback_is_off_where_it_is_for_all_of_them(self):
        assert compressor(tuned("int4", [made("AdamW"), made("AdamW")])) == compressor("int4:error_feedback=false")
        assert tuned("int4", [self.muon(), made("AdamW")]) == "int4"


@needs_muon
@pytest.mark.parametrize("spec", ["ternary", "batched-powersgd", "powersgd:rank=26,payload=int4"])
def test_muon_is_not_taken_for_sgd_with_momentum_and_keeps_the_whole_residual(spec):
    assert FEEDBACK["SGD with momentum"].keys() >= {"ternary", "batched-powersgd"}
    assert tuned(spec, torch.optim.Muon(matrices(1))) == spec
