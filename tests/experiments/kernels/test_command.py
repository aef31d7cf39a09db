import json
import signal

import pytest
import torch

from gradwire import kernels
from gradwire.experiments.cli import main
from gradwire.experiments.kernels.bench import Bench
from gradwire.kernels import dispatch

from .given import EVERY, SIZE, named

QUICK = ["--sizes", str(SIZE), "--repeats", "3", "--seconds", "0", "--threads", "1", "--device", "cpu"]
KEYS = {
    *("operation", "backend", "dtype", "elements", "threads", "correct"),
    *("seconds", "floor_bytes", "fraction_of_copy", "baseline", "baseline_seconds"),
}


@pytest.fixture
def measured(tmp_path, capsys):
    """Runs the command: its exit code, its document, what it printed."""

    def run(*options):
        file = tmp_path / "figures.json"
        code = main(["kernels", *QUICK, "--json", str(file), *options])
        return code, json.loads(file.read_text()), capsys.readouterr().out

    return run


@pytest.fixture
def backend(monkeypatch):
    """Adds a backend for CPU tensors with implementations of some operations."""

    def add(name, **implementations):
        monkeypatch.setitem(dispatch._backends, name, dispatch.Backend(name, "cpu", lambda: ""))
        for operation, function in implementations.items():
            monkeypatch.setitem(kernels.operations()[operation].implementations, name, function)

    return add


def test_every_backend_that_works_here_is_measured_on_what_it_has_and_is_right(measured):
    code, document, printed = measured("--dtypes", "fp32,bf16")
    assert code == 0, printed
    assert document["kind"] == "kernels"
    assert {"processor", "last_level_cache_bytes", "load"} <= set(document["environment"])
    assert document["copy_bytes_per_second"] > 0
    rows = document["rows"]
    assert all(set(row) >= KEYS for row in rows)
    assert all(row["correct"] and row["seconds"] > 0 and row["baseline_seconds"] > 0 for row in rows)
    reference = [(row["operation"], row["dtype"]) for row in rows if row["backend"] == "reference"]
    assert sorted(reference) == sorted((case.name, dtype) for case, dtype in EVERY if dtype != "fp16")
    native = {each.name: each for each in kernels.backends()}["native"]
    if native.available:
        assert {"cast_scaled:to=fp16", "sign_pack", "select_largest", "powersgd:rank=4"} <= {
            row["operation"] for row in rows if row["backend"] == "native"
        }


def test_the_fraction_is_floor_bytes_a_second_over_bytes_copied_a_second(measured):
    _, document, _ = measured("--operations", "all_finite", "--backends", "reference")
    (row,) = document["rows"]
    assert row["floor_bytes"] == 4 * SIZE
    assert row["fraction_of_copy"] == pytest.approx(4 * SIZE / row["seconds"] / row["copy_bytes_per_second"])
    assert row["copy_bytes_per_second"] == document["copy_bytes_per_second"]
    first, third = row["quartile_seconds"]
    assert first <= row["seconds"] <= third
    assert row["repeats"] == 3


def wrong_answer(tensor):
    return torch.tensor(False)


def silent(*arguments):
    """Leaves its outputs as they are."""


def one_off(source, out, scale):
    kernels.cast_scaled.reference(source, out, scale)
    out[1234] += out[1234].abs()


def broken(*arguments):
    raise RuntimeError("no such kernel image")


@pytest.mark.parametrize(
    ("case", "implementation", "reason"),
    [
        ("all_finite", wrong_answer, "answers: "),
        ("sign_pack", silent, "scales: the first of 40 differences is at 0, nan for"),
        ("select_largest", silent, "indices: "),
        ("low_rank_right:rank=4", silent, "q: "),
        ("low_rank_left:rank=4", broken, "RuntimeError: no such kernel image"),
        ("cast_scaled:to=fp16", one_off, "out: the first of 1 differences is at 1,234, "),
    ],
)
def test_a_backend_that_is_wrong_gets_a_red_row_without_figures_and_the_exit_code_1(
    measured, backend, case, implementation, reason
):
    backend("bad", **{named(case).uses[0]: implementation})
    code, document, printed = measured("--operations", case, "--backends", "bad,reference")
    assert code == 1
    bad, reference = document["rows"]
    assert (bad["backend"], bad["correct"], reference["correct"]) == ("bad", False, True)
    assert bad["seconds"] is bad["fraction_of_copy"] is bad["baseline_seconds"] is None
    assert reason in bad["wrong"]
    assert "wrong" in printed
    assert f"WRONG: {case} on bad" in printed
    assert reference["seconds"] > 0


@pytest.fixture
def stopped(monkeypatch):
    """Ends the measurement, by Ctrl-C or a request to terminate, before the job of that name."""
    measure = Bench.measure

    def stop(name, number):
        def stopping(bench, group):
            if group.case.name == name:
                signal.raise_signal(number)
            return measure(bench, group)

        monkeypatch.setattr(Bench, "measure", stopping)

    def unhandled(number, frame):
        raise AssertionError("kernels had no handler")

    before = signal.signal(signal.SIGTERM, unhandled)
    yield stop
    assert signal.signal(signal.SIGTERM, before) is unhandled


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_before_a_stop_is_shown_and_written(number, stopped, tmp_path, capsys):
    stopped("all_finite", number)
    file = tmp_path / "figures.json"
    options = ["--operations", "sign_pack,all_finite", "--backends", "reference", "--json", str(file)]
    assert main(["kernels", *QUICK, *options]) == 130
    told = capsys.readouterr()
    assert [row["operation"] for row in json.loads(file.read_text())["rows"]] == ["sign_pack"]
    assert f"{SIZE:,} elements, fp32, 1 thread" in told.out
    assert "stopped; finished results are kept" in told.err


@pytest.mark.parametrize(
    ("device", "reason", "told"), [("cuda", "", "it is for cuda tensors"), ("cpu", "no compiler", "no compiler")]
)
def test_a_backend_that_cannot_be_measured_here_is_refused(device, reason, told, capsys, monkeypatch):
    monkeypatch.setitem(dispatch._backends, "other", dispatch.Backend("other", device, lambda: reason))
    assert main(["kernels", *QUICK, "--backends", "other"]) == 2
    assert f"'other' cannot be measured here: {told}" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_backend_of_a_device_is_right(tmp_path):
    file = tmp_path / "figures.json"
    assert main(["kernels", "--device", "cuda", "--sizes", "1M", "--repeats", "3", "--json", str(file)]) == 0
