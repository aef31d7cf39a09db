"""The page's table of errors is what its script computes, and the situations of the decision table are whole."""

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("predicted_steps", DOCS / "benchmarks" / "predicted_steps.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_page_and_the_file_have_what_the_script_computes(script):
    assert "\n".join(script.check_rows()) in script.PAGE.read_text("utf-8"), "run predicted_steps.py --write"
    assert script.STEPS.read_text("utf-8").splitlines() == list(script.all_rows()), "run predicted_steps.py --write"


def test_measured_steps_are_within_10_per_cent_by_the_median_and_15_where_ranks_share_cores(script):
    one, box, bandwidth, training, plain, _ = script.checks().values()
    for group, most in ((one, 0.1), (box, 0.1), (bandwidth, 0.1), (plain, 0.1), (training, 0.15)):
        errors = sorted(abs(each.error) for each in group)
        assert errors[len(errors) // 2] < most


def test_situations_have_every_pair_and_compression_never_gains_more_than_its_bytes(script):
    found = script.situations()
    keys = [(each.hosts, each.gpus_per_host, each.network, each.micro_batches) for each in found]
    assert len(keys) == len(set(keys)) == 3 * 3 * 2 + 1
    for each in found:
        assert each.speed_up("bf16") == (1.0, 1.0)
        low, high = each.speed_up("int4", over="none")
        assert 0 < low <= high < 8
