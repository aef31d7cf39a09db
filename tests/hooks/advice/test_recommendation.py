"""Which choice is recommended, of steps made by hand; and the losses that it rests on, against the study's table."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradwire.compress import compressor
from gradwire.hooks.advice import Choice, Forecast, Rule
from gradwire.hooks.advice.candidates import ADAM, METHODS, SGD, TWO_LEVELS, Method, family, methods
from gradwire.hooks.advice.predict import Prediction

PAGE = Path(__file__).parents[3] / "docs" / "compressors.md"


def choice(spec, step, *, loss=0.0, order="backward", dense_start=False):
    return Choice(Method(spec, dense_start=dense_start), order, Prediction(step, 0.0, 0.0, 0), loss)


def chosen(*choices, **rule):
    return Rule(**rule).chosen(choices)


NONE = choice("none", 1.0)


def test_the_fastest_within_the_tolerance_is_recommended():
    lossy, kept = choice("onebit", 0.2, loss=0.09), choice("int4", 0.3, loss=0.003)
    assert chosen(NONE, lossy, kept) is kept
    assert chosen(NONE, lossy, kept, tolerance=0.1) is lossy


def test_what_was_not_studied_is_never_recommended():
    assert chosen(NONE, choice("mine", 0.1, loss=None)) is NONE


def test_a_gain_that_is_not_worth_it_leaves_what_gives_nothing_up():
    half, lossy = choice("bf16", 0.6), choice("int4", 0.56, loss=0.003)
    assert chosen(NONE, half, lossy) is half
    assert chosen(NONE, half, lossy, worthwhile=1.05) is lossy


def test_of_equally_fast_methods_that_which_loses_least_is_taken():
    low, high = choice("int4", 0.305, loss=0.003), choice("powersgd", 0.3, loss=0.02)
    assert chosen(NONE, low, high) is low


def test_of_equally_fast_methods_whose_losses_cannot_be_told_apart_the_simplest_order_is_taken():
    backward, priority = choice("int4", 0.305, loss=0.003), choice("int8", 0.3, loss=0.001, order="priority")
    assert chosen(NONE, backward, priority) is backward


def test_of_equally_fast_ways_that_give_nothing_up_the_simplest_is_taken():
    assert chosen(NONE, choice("none", 0.98, order="priority")) is NONE
    faster = choice("none", 0.9, order="priority")
    assert chosen(NONE, faster) is faster


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"tolerance": -0.1}, "tolerance is a part of the loss, at least 0"),
        ({"worthwhile": 0.9}, "worthwhile is how many"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        Rule(**rule)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (NONE, "ddp_model = torch.nn.parallel.DistributedDataParallel(model)"),
        (choice("bf16", 1.0), 'handle = gradwire.attach(ddp_model, "bf16", optimizer=optimizer)'),
        (
            choice("int4", 1.0, dense_start=True),
            'handle = gradwire.attach(ddp_model, "int4:start_iter=200", optimizer=optimizer)',
        ),
        (
            choice("powersgd:rank=4", 1.0, order="priority", dense_start=True),
            'ddp_model = gradwire.DistributedDataParallel(model, compressor="powersgd:rank=4,start_iter=200", '
            "optimizer=optimizer)\noptimizer = gradwire.overlap(ddp_model, optimizer)",
        ),
    ],
)
def test_the_line_to_paste(given, line):
    assert given.line == line


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.spec)
def test_every_line_has_a_specification_that_there_is(method):
    for spec in (method.spec, TWO_LEVELS + method.spec):
        for order in ("backward", "priority"):
            given = Choice(replace(method, spec=spec), order, Prediction(1.0, 0.0, 0.0, 0), 0.0)
            for written in re.findall(r'(?:attach\(ddp_model, |compressor=)"([^"]+)"', given.line):
                assert compressor(written)
                assert written.startswith(spec)


def test_the_sentence_tells_what_is_gained_and_what_it_costs():
    best = choice("int4", 0.25, loss=0.003)
    told = Forecast(4, 1, (best, choice("bf16", 0.5), NONE), best).sentence
    assert told == (
        "int4 makes a step 4.00x as fast as none and 2.00x as fast as what gives nothing up (250 ms of 1 s), at an expected "
        "loss of +0.3%."
    )
    assert Forecast(4, 1, (NONE,), NONE).sentence.startswith("Do not compress further here: none takes 1 s a step.")


def studied():
    """{specification: mean excess loss of GPT, ResNet, LSTM, parts} of the page's table."""
    rows = {}
    for line in PAGE.read_text("utf-8").splitlines():
        if found := re.match(r"\| `([^`]+)` \|[^|]*\|", line):
            means = re.findall(r"([+-][\d.]+) (?:±|\()", line)
            if len(means) == 3:
                rows[found[1]] = [float(mean) / 100 for mean in means]
    return rows


@pytest.mark.parametrize("method", METHODS[1:], ids=lambda method: method.spec)
def test_losses_are_those_of_the_study(method):
    if method.dense_start:
        name, _, options = method.spec.partition(":")
        feedback = [each for each in options.split(",") if each.startswith("feedback")]
        others = [each for each in options.split(",") if each and not each.startswith("feedback")]
        spec = f"{name}:{','.join([*others, 'start_iter=20', *feedback])}"
    else:
        spec = method.spec
    gpt, resnet, lstm = studied()[spec]
    assert method.adam == pytest.approx(gpt, abs=1e-4)
    assert method.sgd == pytest.approx(max(resnet, lstm), abs=1e-4)


def test_losses_are_told_by_the_family_of_the_optimizer():
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert family(torch.optim.AdamW(parameters)) == ADAM
    assert family(torch.optim.SGD(parameters, 0.1, 0.9)) == family(torch.optim.SGD(parameters, 0.1)) == SGD
    int2 = next(method for method in METHODS if method.spec == "int2")
    assert (int2.loss(ADAM), int2.loss(SGD)) == (int2.adam, int2.sgd)


def test_none_is_always_among_the_methods_and_unknown_ones_have_no_loss():
    assert [method.spec for method in methods(["int4", "powersgd:rank=7", "int4"])] == [
        "none",
        "int4",
        "powersgd:rank=7",
    ]
    assert methods(["powersgd:rank=7"])[1].loss(SGD) is None
