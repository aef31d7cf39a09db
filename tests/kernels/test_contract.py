"""When the arguments of an operation are looked at, and how much of Python a call runs."""

import logging

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Backend, Residual, contract, dispatch


@pytest.fixture
def asked():
    return []


@pytest.fixture
def sum_into(asked, monkeypatch):
    """An operation with a backend for float32 that notes what is asked and what runs."""
    monkeypatch.setattr(dispatch, "_operations", {})
    monkeypatch.setitem(dispatch._backends, "strict", Backend("strict", "cpu", lambda: ""))
    contract.log_unknown.cache_clear()

    def check(first, residual, size):
        asked.append("check")
        if size < 0:
            raise ValueError("the size is negative")

    @kernels.operation(check=check, apart=[("first", "residual")])
    def sum_into(first, residual, size, scale=1.0):
        asked.append("reference")

    @sum_into.implement(
        "strict", {"first": (torch.float32,)}, unless=lambda first, residual, size: "nines" * (size == 9)
    )
    def run(first, residual, size, scale=1.0):
        asked.append(scale)

    with kernels.use_backend("strict"):
        yield sum_into


def test_what_is_refused_is_refused_every_time(sum_into, asked):
    for _ in range(2):
        with pytest.raises(ValueError, match="the size is negative"):
            sum_into(torch.ones(3), None, -1)
    assert asked == ["check", "check"]


def test_arguments_may_be_given_by_name(sum_into, asked):
    sum_into(torch.ones(3), size=3, residual=None, scale=3.0)
    sum_into(torch.ones(3), None, 3, scale=2.0)
    with pytest.raises(ValueError, match="the size is negative"):
        sum_into(torch.ones(3), None, size=-1)
    assert asked == ["check", 3.0, 2.0, "check"]


def test_what_a_backend_does_not_know_is_not_checked_and_runs_on_the_reference_which_is_logged_once(
    sum_into, asked, caplog
):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        sum_into(torch.ones(3, dtype=torch.float64), None, -1)
        sum_into(torch.ones(3), None, 9)
    assert asked == ["reference"] * 4
    assert [record.getMessage() for record in caplog.records] == [
        "strict sum_into does not know torch.float64, the backend reference runs",
        "strict sum_into does not know nines, the backend reference runs",
    ]


def test_whether_memory_overlaps_is_looked_at_every_time(sum_into):
    memory = torch.ones(12)
    sum_into(memory[:3], Residual(memory[3:6], memory[6:9]), 3)
    sum_into(memory[:3], Residual(memory[3:6], memory[3:6]), 3)
    for first, before, after, words in (
        (0, 2, 6, r"first and residual\.before overlap"),
        (4, 0, 6, r"first and residual\.after overlap"),
        (9, 3, 5, r"residual\.before and residual\.after overlap"),
    ):
        parts = [memory[start : start + 3] for start in (first, before, after)]
        with pytest.raises(ValueError, match=words):
            sum_into(parts[0], Residual(*parts[1:]), 3)
