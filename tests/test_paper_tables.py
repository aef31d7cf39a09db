"""docs/benchmarks/ef21_bits.py, muloco_sites.py, low_rank_choices.py and muon_feedback.py, on small inputs."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from gradwire.compress import Layout, Ranks, Simulation, compressor
from gradwire.compress.algorithms.adapters import TwoShot
from gradwire.compress.feedback.error_feedback import ErrorFeedback
from gradwire.compress.simulate import dry_run
from gradwire.compress.state import tree as states
from gradwire.experiments.workloads.data import DataConfig, load_dataset
from gradwire.experiments.workloads.models import ModelConfig
from gradwire.experiments.workloads.training import initial_model

ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "docs" / "results" / "papers"
LOSS = PAPERS.parent / "loss"
PAGE = (PAPERS / "README.md").read_text("utf-8")
CPU = torch.device("cpu")
TINY = ModelConfig("gpt", width=8, layers=1, heads=1, context=8)
ELEMENTS, STEPS = 40, 4


@pytest.fixture
def script(monkeypatch):
    """A function from a script's name to its module."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "benchmarks")
    return importlib.import_module


@pytest.mark.parametrize(
    ("name", "spec", "scale"),
    [("EF14-SGD", "topk:k=10", 1), ("EF14-SGD with momentum", "topk:k=10,momentum=0.9", 0.1)],
)
def test_ef14_and_its_bits_are_those_of_topk(script, name, spec, scale):
    bits = script("ef21_bits")
    layout = Layout(("weight",), ((ELEMENTS,),), torch.float32, CPU, Ranks(bits.RANKS))
    ranks, simulation = bits.Ranks(name, 1, ELEMENTS), Simulation(compressor(spec), layout)
    for gradients in torch.randn(STEPS, bits.RANKS, ELEMENTS):
        average = simulation.step(list(gradients))[0]
        torch.testing.assert_close(ranks.average(gradients[None])[0], scale * average)
    assert 8 * simulation.traffic.payload_bytes == bits.KEPT * bits.BITS


def test_ef21_that_sends_all_elements_averages_gradients(script, monkeypatch):
    bits = script("ef21_bits")
    monkeypatch.setattr(bits, "KEPT", ELEMENTS)
    ranks = bits.Ranks("EF21-SGD", 1, ELEMENTS)
    for gradients in torch.randn(STEPS, bits.RANKS, ELEMENTS):
        torch.testing.assert_close(ranks.average(gradients[None])[0], gradients.mean(0))


def test_the_gradients_of_logistic_regression_are_autograd_s(script):
    bits = script("ef21_bits")
    labels = torch.nn.functional.one_hot(torch.randint(4, (bits.RANKS, 3)), 4).float()
    problem = bits.Problem(torch.randn(bits.RANKS, 3, 6), labels)
    x = torch.randn(1, 6, 4, requires_grad=True)
    log_probabilities = torch.einsum("nbf,fc->nbc", problem.samples, x[0]).log_softmax(-1)
    loss = -(problem.labels * log_probabilities).sum(-1).mean() + bits.LAMBDA * (x**2 / (1 + x**2)).sum()
    loss.backward()
    found = problem.gradients(x.detach(), problem.all_samples()).mean(1)
    torch.testing.assert_close(found, x.grad, rtol=1e-4, atol=1e-6)


@pytest.fixture
def sites(script, monkeypatch):
    """The script of local SGD with a tiny model, and its data."""
    found = script("muloco_sites")
    for name, value in {"MODEL": TINY, "SEQUENCES": 2, "STEPS": 2, "EVERY": 2, "WARMUP": 1}.items():
        monkeypatch.setattr(found, name, value)
    return found, load_dataset(DataConfig("text", ROOT / "compress"), TINY)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_plain_averages_of_one_site_are_training_in_one_place(sites, optimizer):
    script, data = sites
    alone = script.trained(script.Run(optimizer), data)
    averaged = script.trained(script.Run(optimizer, 1, outer="average"), data)
    for one, other in zip(alone.parameters(), averaged.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("bits", "tolerance"), [(32, 1e-6), (8, 1e-3)])
def test_plain_averages_of_two_sites_are_the_means_of_their_models(sites, bits, tolerance):
    script, data = sites
    apart = script.sites_of(script.Run("adamw", 2), data)
    for site in apart:
        site.step()
        site.step()
    mean = sum(site.flat() for site in apart) / 2
    averaged = script.trained(script.Run("adamw", 2, bits, "average"), data)
    flat = torch.nn.utils.parameters_to_vector(averaged.parameters())
    torch.testing.assert_close(flat, mean, rtol=0, atol=tolerance)


def sent_bytes(script, built):
    model = initial_model(script.TASK.config(0), load_dataset(DataConfig("text", ROOT / "compress"), TINY), CPU)
    named = dict(model.named_parameters())
    shapes = tuple(tuple(each.shape) for each in named.values())
    return dry_run(built, Layout(tuple(named), shapes, torch.float32, CPU, Ranks(4))).sent_bytes


def test_choices_of_ranks_send_as_many_bytes(script):
    choices = script("low_rank_choices")
    gradients = {"wide": torch.randn(128, 256), "narrow": torch.randn(128, 1) @ torch.randn(1, 256)}
    ranks = choices.by_spectrum(gradients)
    assert ranks == {"wide": 2 * choices.RANK - 1, "narrow": 1}
    wanted = sent_bytes(choices, choices.late({choices.START: choices.factors(choices.RANK)}))
    for edges, otherwise in ((10, 5), (2, 7)):
        built = choices.by_name(dict.fromkeys(choices.EDGES, edges), otherwise)
        assert sent_bytes(choices, built) == pytest.approx(wanted, rel=0.08)


NARROW = Layout(("weight",), ((10, 13),), torch.float32, CPU, Ranks(2))


def test_largest_coefficients_of_cosines_and_the_residual_are_the_gradient(script):
    choices, gradients = script("low_rank_choices"), list(torch.randn(2, NARROW.numel))
    again = choices.cosines(choices.cosines(gradients[0]), back=True)
    torch.testing.assert_close(again[: NARROW.numel], gradients[0])
    simulation = Simulation(choices.with_codec("topk:k=9", choices.OfCosines), NARROW)
    average = simulation.step([each.clone() for each in gradients])[0]
    held = sum(state.residual.flat for state in simulation.states) / 2
    torch.testing.assert_close(average + held, (gradients[0] + gradients[1]) / 2)
    assert torch.count_nonzero(choices.cosines(average).abs() > 1e-5) <= 18


def test_an_average_of_senders_counts_those_that_sent(script):
    choices, gradients = script("low_rank_choices"), list(torch.zeros(2, NARROW.numel))
    gradients[0][:9], gradients[1][6:15] = 2.0, 4.0
    simulation = Simulation(choices.with_codec("topk:k=9", choices.OfSenders), NARROW)
    average = simulation.step([each.clone() for each in gradients])[0]
    assert average[:15].tolist() == [2.0] * 6 + [3.0] * 3 + [4.0] * 6
    assert not average[15:].any()


MATRIX = Layout(("blocks.linear1.weight",), ((32, 16),), torch.float32, CPU, Ranks(2))


def averages(built, gradients, steps):
    """The averages of steps with the same gradients, and the state of the simulator."""
    simulation = Simulation(built, MATRIX)
    return [simulation.step([each.clone() for each in gradients])[0] for _ in range(steps)], simulation


def test_differences_of_momentum_that_are_sent_whole_are_nesterov_s_momentum(script):
    gradients = list(torch.randn(2, MATRIX.numel))
    optimizer = torch.optim.SGD(
        [weight := torch.zeros(MATRIX.numel, requires_grad=True)], 1.0, momentum=0.95, nesterov=True
    )
    ways = script("muon_feedback")
    for found in averages(ways.DifferencesOfMomentum(ways.Dense()), gradients, STEPS)[0]:
        before, weight.grad = weight.detach().clone(), (gradients[0] + gradients[1]) / 2
        optimizer.step()
        torch.testing.assert_close(found, 0.05 * (before - weight.detach()), rtol=1e-4, atol=1e-6)


def test_differences_of_momentum_in_two_bits_come_close_to_it(script):
    ways, gradients = script("muon_feedback"), list(torch.randn(2, MATRIX.numel))
    found, _ = averages(ways.DifferencesOfMomentum(ways.TWO_BITS), gradients, 300)
    torch.testing.assert_close(found[-1], (gradients[0] + gradients[1]) / 2, rtol=0, atol=1e-3)


def test_dion_of_full_rank_is_momentum(script):
    ways, gradients = script("muon_feedback"), list(torch.randn(2, MATRIX.numel))
    momentum = torch.zeros(MATRIX.numel)
    for found in averages(ways.Dion(16), gradients, STEPS)[0]:
        momentum = 0.95 * momentum + (gradients[0] + gradients[1]) / 2
        torch.testing.assert_close(found, momentum, rtol=1e-4, atol=1e-4)


def test_fitted_levels_lose_least_of_normal_numbers_and_all_that_is_lost_is_held_back(script):
    ways, gradients, lost = script("muon_feedback"), list(torch.randn(2, MATRIX.numel)), {}
    for codec in (ways.Int2(), ways.FittedInt2()):
        found, simulation = averages(ErrorFeedback(TwoShot(codec)), gradients, 1)
        residuals = [states.held_back(each)["blocks.linear1.weight"] for each in simulation.states]
        lost[type(codec).__name__] = sum(each.square().sum() for each in residuals)
        torch.testing.assert_close(found[0] + sum(residuals) / 2, sum(gradients) / 2, rtol=1e-4, atol=1e-5)
    assert lost["FittedInt2"] < 0.8 * lost["Int2"]


def test_the_table_of_feedback_under_muon_is_that_of_its_file(script):
    page = (LOSS / "README.md").read_text("utf-8").replace("`", "")
    runs = json.loads((LOSS / "muon-feedback.json").read_text())["runs"]
    exact = {run["seed"]: run for run in runs if run["way"] == "none"}
    for way in script("muon_feedback").WAYS:
        own = [run for run in runs if run["way"] == way]
        assert len(own) == 3
        excess = torch.tensor([100 * (run["loss"] / exact[run["seed"]]["loss"] - 1) for run in own])
        fewer = exact[0]["sent_bytes"] / own[0]["sent_bytes"]
        if way.startswith("none"):
            assert excess.abs().max() < 0.02  # so that momentum on the ranks alone changes nothing
        else:
            assert f"| {way} | {fewer:.0f}x | {excess.mean():+.1f} ± {excess.std():.1f} |\n" in page


def test_the_table_of_ef21_on_the_page_is_that_of_its_file(script):
    bits = script("ef21_bits")
    for line in bits.table(json.loads((PAPERS / "ef21-bits.json").read_text())["rows"]).splitlines():
        assert f"{line}\n" in PAGE


def test_the_table_of_local_sgd_on_the_page_is_that_of_its_file(script):
    sites = script("muloco_sites")
    for line in sites.lines(sites.Known(PAPERS / "muloco-sites.json"), range(2)):
        assert f"{line}\n" in PAGE


def test_a_finished_run_is_not_repeated(script, tmp_path):
    file, runs = tmp_path / "new" / "runs.json", [{"seed": seed} for seed in range(3)]
    first = script("finished_runs").FinishedRuns(file)
    for run in first.missing(runs[:2]):
        first.add(run, loss=float(run["seed"]))
    again = script("finished_runs").FinishedRuns(file)
    assert list(again.missing(runs)) == runs[2:]
    assert again.find({"seed": 1}) == {"seed": 1, "loss": 1.0}
