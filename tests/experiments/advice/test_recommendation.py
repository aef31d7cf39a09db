"""Which choice is recommended, of steps made by hand."""

import re
from dataclasses import replace

import pytest
import torch

import gradwire
from gradwire.compress import compressor
from gradwire.experiments.advice import Choice, Forecast, Rule
from gradwire.experiments.advice.candidates import (
    ADAMW,
    CANDIDATES,
    MUON,
    SGD,
    TWO_LEVELS,
    Candidate,
    candidates,
    family,
)
from gradwire.experiments.advice.predict import Prediction
from gradwire.experiments.advice.rule import wide


def choice(spec, step, *, loss=0.0, order="backward"):
    return Choice(Candidate(spec), order, Prediction(step, 0.0, 0.0), loss)


def chosen(*choices, **rule):
    return Rule(**rule).chosen(choices)[0]


NONE = choice("none", 1.0)


@pytest.mark.parametrize(
    "spec", [*(each.spec for each in CANDIDATES), "fp16", "hosts:ranks=2+int8", "hosts:ranks=2+int4"]
)
def test_wide_compressors_are_those_that_send_8_bits_or_more_of_a_number(spec):
    with torch.device("meta"):
        model = torch.nn.Linear(1024, 1024, bias=False)
    assert wide(spec) == (gradwire.plan(model, spec, world_size=4).compression_ratio <= 32 / 8)


def test_the_last_of_8_bits_or_more_is_recommended_and_the_next_step_is_within_the_tolerance():
    wide, few = choice("int8", 0.5, loss=0.001), choice("int4", 0.3, loss=0.04)
    assert Rule().chosen([NONE, few, wide]) == (wide, None)
    assert Rule(tolerance=0.05).chosen([NONE, few, wide]) == (wide, few)
    assert Rule(tolerance=0.05).chosen([NONE, few, choice("bf16", 0.6), replace(wide, tried=0.58)])[0].spec == "bf16"


def test_with_muon_fewer_than_8_bits_are_neither_recommended_nor_the_next_step():
    few = choice("int4:core=4", 0.3, loss=0.008)
    found = Forecast.ranked(2, 1, [NONE, few, choice("int8", 0.5)], Rule(wide_only=True))
    assert (found.best.spec, found.beyond) == ("int8", None)
    assert found.sentence.endswith(" Stop there: with Muon, 4 bits cost loss.")
    assert Forecast.ranked(2, 1, [NONE, few], Rule(wide_only=True)).best == NONE


def test_without_one_of_8_bits_that_is_worth_it_fewer_bits_are_the_next_step_or_recommended_where_none_was_offered():
    first, more = choice("int4", 0.4, loss=0.012), choice("onebit", 0.2, loss=0.02)
    assert Rule().chosen([NONE, more, first, choice("bf16", 0.95)]) == (NONE, first)
    assert Rule(few=True).chosen([NONE, more, first]) == (first, more)
    told = Forecast.ranked(2, 1, [NONE, first, choice("bf16", 0.95)], Rule()).sentence
    assert told.startswith(
        "Do not compress here. Keep your script: none takes 1 s per step. Next step: int4 takes 400 ms, "
    )


def test_the_next_step_is_named_with_its_time_and_its_loss():
    told = Forecast.ranked(2, 1, [NONE, choice("int8", 0.5), choice("int4", 0.25, loss=0.012)], Rule()).sentence
    assert told.startswith("Use int8: 500 ms per step")
    assert told.endswith(" Next step: int4 takes 250 ms, 2.00x faster, at an expected loss of +1.2%.")


def test_what_was_not_studied_is_never_recommended():
    assert chosen(NONE, choice("mine", 0.1, loss=None)) is NONE


def test_a_gain_that_is_not_worth_it_leaves_what_gives_nothing_up():
    half, lossy = choice("bf16", 0.6), choice("int8", 0.56, loss=0.003)
    assert chosen(NONE, half, lossy) is half
    assert chosen(NONE, half, lossy, worthwhile=1.05) is lossy


def test_of_equally_fast_methods_that_which_loses_least_is_taken():
    low, high = choice("int4", 0.305, loss=0.003), choice("powersgd", 0.3, loss=0.02)
    assert chosen(NONE, low, high, few=True) is low


def test_what_loses_more_has_to_be_worth_it_over_what_loses_less():
    eight = choice("int8", 0.3, loss=0.001)
    four, less = choice("int4", 0.28, loss=0.012), choice("int4", 0.27, loss=0.012)
    assert Rule().chosen([NONE, eight, four]) == (eight, None)
    assert Rule().chosen([NONE, eight, less]) == (eight, less)
    assert chosen(NONE, choice("bf16", 0.95), choice("int8", 0.9, loss=0.001)).spec == "int8"  # bf16 was not worth it


def test_of_low_rank_compressors_it_says_that_their_losses_are_those_of_short_trainings():
    low, other = choice("powersgd:rank=8,payload=int8", 0.3, loss=0.009), choice("int4", 0.3, loss=0.003)
    said = [Forecast.ranked(2, 1, [NONE, each], Rule()).sentence for each in (low, other)]
    assert ["falls further behind the longer a training is" in each for each in said] == [True, False]


def test_of_equally_fast_methods_whose_losses_cannot_be_told_apart_the_simplest_order_is_taken():
    backward, priority = choice("int8", 0.305, loss=0.003), choice("int8", 0.3, loss=0.001, order="priority")
    assert chosen(NONE, backward, priority) is backward


def test_overlap_alone_is_not_all_that_pays_where_a_compressor_is_the_next_step():
    choices = NONE, choice("none", 0.8, order="priority"), choice("int8", 0.79), choice("int4", 0.5)
    said = Forecast.ranked(8, 1, choices, Rule()).sentence
    assert said.startswith(
        "Use none, by priority: it takes 800 ms per step, and none 1 s. Next step: int4 takes 500 ms, "
    )


def test_of_equally_fast_ways_that_give_nothing_up_the_simplest_is_taken():
    assert chosen(NONE, choice("none", 0.98, order="priority")) is NONE
    faster = choice("none", 0.9, order="priority")
    assert chosen(NONE, faster) is faster
    said = "Do not compress; overlap alone pays: none, by priority takes 900 ms per step, and none 1 s."
    assert Forecast(2, 1, (faster, NONE), faster).sentence == said


@pytest.mark.parametrize("other", [choice("none", 0.95, order="priority"), choice("bf16", 0.95)])
def test_a_gain_that_is_not_worth_it_leaves_the_script_as_it_is(other):
    best = chosen(NONE, other)
    assert best is NONE
    assert "Do not compress here. Keep your script" in Forecast(2, 1, (other, NONE), best).sentence


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (NONE, "ddp_model = torch.nn.parallel.DistributedDataParallel(model)"),
        (choice("bf16", 1.0), 'handle = gradwire.attach(ddp_model, "bf16", optimizer=optimizer)'),
        (choice("int4", 1.0), 'handle = gradwire.attach(ddp_model, "int4", optimizer=optimizer)'),
        (
            choice("powersgd:rank=4", 1.0, order="priority"),
            'ddp_model = gradwire.DistributedDataParallel(model, compressor="powersgd:rank=4", '
            "optimizer=optimizer)\n"
            "optimizer = gradwire.overlap(ddp_model, optimizer)  # gains nothing if you clip gradients by norm",
        ),
    ],
)
def test_the_line_to_paste(given, line):
    assert given.line == line


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.spec)
def test_every_line_has_a_compressor_that_there_is(candidate):
    for spec in (candidate.spec, TWO_LEVELS + candidate.spec):
        for order in ("backward", "priority"):
            given = Choice(replace(candidate, spec=spec), order, Prediction(1.0, 0.0, 0.0), 0.0)
            for written in re.findall(r'(?:attach\(ddp_model, |compressor=)"([^"]+)"', given.line):
                assert compressor(written)
                assert written.startswith(spec)


def test_other_hosts_have_lines_to_paste():
    best = choice("hosts+int8", 0.3)
    *script, launch = [line.strip() for line in Forecast(16, 8, (best, NONE), best).to_paste()][1:]
    assert script == best.line.splitlines()
    assert launch.startswith("torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400")


def test_losses_are_those_of_the_optimizer():
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert family(torch.optim.AdamW(parameters)) == ADAMW
    assert family(torch.optim.SGD(parameters, 0.1, 0.9)) == family(torch.optim.SGD(parameters, 0.1)) == SGD
    muon = type("Muon", (torch.optim.SGD,), {})
    assert family(muon([torch.nn.Parameter(torch.zeros(2, 2))], 0.1)) == MUON


def test_none_is_always_among_the_candidates_and_unknown_ones_have_no_loss():
    found = candidates(["int4", "powersgd:rank=7", "int4"])
    assert [each.spec for each in found] == ["none", "int4", "powersgd:rank=7"]
    assert found[2].losses == {}
