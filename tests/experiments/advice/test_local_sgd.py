"""When advice suggests local SGD, of measurements made by hand."""

import shlex
from types import SimpleNamespace

import pytest
import torch

from gradwire.compress import Ranks
from gradwire.compress.protocol.requests import AllReduce
from gradwire.experiments.advice.local_sgd import suggested
from gradwire.experiments.cli.main import main

STEP = 0.1  # seconds of computation


def measured(mbit, per_host=1, scope="all", parameters=1_000_000):
    link = SimpleNamespace(alpha=0.02, beta=8e-6 / mbit)
    return SimpleNamespace(
        computation=SimpleNamespace(seconds=STEP),
        parameters={"weight": torch.empty(parameters // 1000, 1000, device="meta")},
        costs={(AllReduce, torch.float32, scope): SimpleNamespace(link=link)},
        ranks=Ranks(4, 0, per_host),
    )


def test_on_a_slow_network_local_sgd_is_suggested_with_the_command_that_plans_it(capsys):
    sentence, command = suggested(measured(10), 0.6)
    assert sentence.startswith(
        "Local SGD (LocalSteps, every=8, fragments=1, int4) would compute for 100% of the time here"
    )
    assert "this compressor for 17%" in sentence
    program, *arguments = shlex.split(command)
    assert (program, main(arguments)) == ("gradwire", 0)
    (row,) = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│ int4" in line]
    assert row[2].strip() == "8"


@pytest.mark.parametrize(
    ("given", "step"),
    [
        (measured(10), 2 * STEP),  # twice the steps take as long
        (measured(0.1), 6.0),  # more than 32 steps between averages
        (measured(10, per_host=2), 0.6),
        (measured(10, scope="host"), 0.6),
        (measured(float("inf")), 0.6),
    ],
)
def test_elsewhere_it_is_not(given, step):
    assert suggested(given, step) == []
