"""A few fixed trials, of each kind; `make fuzz` runs more."""

from dataclasses import replace

import pytest
import torch

from ..ddp_core.averaging.test_same_kernels import native
from ..torch_versions import buffers_by_argument, complex_numbers, fsdp_of_others
from ..wan import Direction
from . import draw, known, pauses, sites
from .kinds import KINDS
from .run import outcome
from .sites import FAST

TRAINING = [27, 84]  # 27: a step that is thrown away, a fork, a damaged state
TRAINING += [26, 1803]  # a static graph with a forward that is dropped, and a resume; then a swap
TRAINING += [pytest.param(3045, marks=complex_numbers)]  # new buckets, with what a server of bfloat16 held back
TRAINING += [pytest.param(23, marks=complex_numbers)]
FAILING = [72, 21, 31]  # a rank that is killed; one that swaps, or loads, alone
FAILING += [pytest.param(14, marks=buffers_by_argument)]  # one that is stopped for a while
OTHERS = [("overlap", 8), ("local", 3), ("local", 85), ("sites", 6)]
OTHERS += [("halves", 4), ("pauses", 0)]
OTHERS += [("scales", 1), ("formats", 0), ("tokens", 0), ("tasks", 0)]
OTHERS += [("collectives", seed) for seed in (5, 4, 1)]  # no mishap; a rank that dies; options that differ
OTHERS += [pytest.param("saves", seed, marks=fsdp_of_others) for seed in (0, 2, 4)]
OTHERS += [pytest.param("meshes", seed, marks=fsdp_of_others) for seed in (10, 11)]  # tensor parallel; replicas
OTHERS += [("programs", seed) for seed in (0, 2)] + [pytest.param("backends", 2, marks=native)]
OTHERS += [pytest.param(kind, seed, marks=complex_numbers) for kind, seed in (("hosts", 4), ("options", 1))]
OTHERS += [pytest.param("shards", seed, marks=fsdp_of_others) for seed in (0, 14)]  # torch's; hybrid, that compresses


@pytest.mark.parametrize("seed", TRAINING)
def test_the_laws_hold_in_a_drawn_trial(ranks, seed):
    assert outcome(ranks, seed).found == []


@pytest.mark.parametrize("seed", FAILING)
def test_a_mishap_ends_in_errors_within_the_time_limit(ranks, seed):
    assert outcome(ranks, seed).found == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), OTHERS)
def test_the_laws_hold_in_trials_of_other_kinds(ranks, kind, seed):
    assert outcome(ranks, seed, kind=kind).found == []


def uncompressed(trial):
    return replace(trial, asked=dict.fromkeys(trial.asked, "none"))


def awaited(trial):
    """Without a step between whose end and the next one an average is under way."""
    everywhere = (("backward", "step"),) * trial.world_size
    return replace(trial, steps=tuple(replace(step, waits=everywhere) for step in trial.steps))


WITHOUT = [
    ("halves", 4, lambda trial: replace(trial, swaps=trial.swaps[:1]), "nothing was held back at a swap"),
    ("programs", 0, lambda trial: replace(trial, steps=trial.steps[:1]), "no buckets were made anew"),
    ("backends", 2, lambda trial: replace(trial, kernels=("reference",) * 2), "the ranks' backends do not differ"),
    pytest.param("meshes", 10, uncompressed, "nothing was held back", marks=fsdp_of_others),
    pytest.param("shards", 14, uncompressed, "nothing was held back", marks=fsdp_of_others),
    ("overlap", 8, awaited, "no average came after the next forward had begun"),
    ("scales", 1, lambda trial: replace(trial, powers=(0,) * len(trial.powers)), "no parameter's averages are larger"),
    ("formats", 0, lambda trial: replace(trial, turned=((),), resumes=(None,)), "no format changed while something"),
    ("tokens", 0, lambda trial: replace(trial, factors=(1.0,) * len(trial.factors)), "nothing befell the residual"),
    ("collectives", 4, lambda trial: replace(trial, calls=0, whose=-1), "did not die"),
    ("collectives", 1, lambda trial: replace(trial, options=0), "rank 0 raised 'nothing'"),
    ("tasks", 0, lambda trial: replace(trial, sizes=(0.0, 1.0), steps=1), "nothing befell task 1"),
]


@pytest.mark.parametrize(("kind", "seed", "cut", "said"), WITHOUT)
def test_a_trial_fails_whose_fault_is_cut_out(ranks, kind, seed, cut, said):
    found, _ = KINDS[kind].undergone(ranks, cut(KINDS[kind].drawn(seed)), 1.0)
    assert any(said in sentence for sentence in found), found


@pytest.mark.parametrize("held", [0, 1])
def test_a_line_that_was_cut_while_nothing_passed_befell_nobody(tmp_path, held):
    trial = next(trial for trial in map(sites.drawn, range(100)) if trial.mishap.startswith("cut"))
    strike, line = sites.Strike(trial, tmp_path, 1.0, None, None), Direction(FAST)
    line.cut, line.held = True, held
    strike.heal(line)
    said = sites.broken(trial, ["did not come"] * trial.world_size, tmp_path, 1.0)
    assert any("nothing befell" in sentence for sentence in said) == (not held)
    assert not line.cut


def test_a_site_that_did_not_pause_befell_nobody(tmp_path):
    trial = pauses.drawn(0)
    for site in range(trial.world_size):
        torch.save(({}, 0.0), tmp_path / str(site))
    said = pauses.broken(trial, ["came"] * trial.world_size, tmp_path, 1.0)
    assert [sentence.endswith("paused for 0.00 s alone") for sentence in said] == [True] * trial.world_size


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_draws_the_same_trial_each_time(kind):
    drawn = KINDS[kind].drawn
    assert [drawn(seed) for seed in range(50)] == [drawn(seed) for seed in range(50)]


def test_most_trials_are_not_known_to_fail():
    assert sum(bool(known.why(draw.drawn(seed))) for seed in range(200)) < 80
