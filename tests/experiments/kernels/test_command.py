import json
import math
import signal
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch

from gradwire import kernels
from gradwire.experiments.cli import main
from gradwire.experiments.kernels import clocks
from gradwire.experiments.kernels.bench import Bench
from gradwire.experiments.kernels.cases import CASES, DTYPES
from gradwire.experiments.kernels.check import difference, kept, outcome
from gradwire.experiments.kernels.clocks import last_level_cache
from gradwire.experiments.kernels.heavy_tail import HeavyTail
from gradwire.experiments.kernels.job import Output
from gradwire.experiments.kernels.race import Racer, race
from gradwire.experiments.kernels.report import HEADINGS
from gradwire.experiments.kernels.rows import Row
from gradwire.kernels import dispatch

CPU = torch.device("cpu")
SIZE = 40_000
QUICK = ["--sizes", str(SIZE), "--repeats", "3", "--seconds", "0", "--threads", "1", "--device", "cpu"]
KEYS = {
    *("operation", "backend", "dtype", "elements", "threads", "correct"),
    *("seconds", "floor_bytes", "fraction_of_copy", "baseline", "baseline_seconds"),
}
EVERY = [(case, dtype) for case in CASES for dtype in case.dtypes]


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    """Nothing here depends on cold caches."""
    monkeypatch.setattr(clocks, "last_level_cache", lambda: 2**16)


@pytest.fixture(scope="module")
def numbers():
    return HeavyTail(SIZE, CPU)


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


def made(case, dtype="fp32", size=SIZE):
    return case.make(size, DTYPES[dtype], CPU)


def named(name):
    return next(case for case in CASES if case.name == name)


def test_every_backend_that_works_here_is_measured_on_what_it_has_and_is_right(measured):
    code, document, printed = measured("--dtypes", "fp32,bf16")
    assert code == 0, printed
    assert set(document) == {"machine", "copy_bytes_per_second", "rows"}
    assert {"processor", "torch", "last_level_cache_bytes", "load"} <= set(document["machine"])
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


def test_all_thread_counts_are_measured_and_torch_s_own_comes_back(measured):
    before = torch.get_num_threads()
    _, document, printed = measured("--operations", "all_finite", "--backends", "reference", "--threads", "1,2")
    assert [row["threads"] for row in document["rows"]] == [1, 2]
    assert torch.get_num_threads() == before
    assert f"{SIZE:,} elements, fp32, 1 thread" in map(str.strip, printed.splitlines())
    assert "2 threads" in printed


def test_the_user_s_random_state_is_left_alone(measured):
    before = torch.get_rng_state()
    measured("--operations", "scatter_mean,powersgd:rank=1", "--backends", "reference")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_table_has_a_column_for_each_figure_and_names_the_baselines(measured):
    _, _, printed = measured("--operations", "select_largest,all_finite")
    assert all(heading in printed for heading in ("operation", "backend", *HEADINGS))
    assert "torch.topk" in printed
    assert "not measured: triton" in printed or "triton" not in {each.name for each in kernels.backends()}


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


def test_where_all_are_wrong_nothing_is_timed(measured, backend):
    backend("bad", all_finite=wrong_answer)
    code, document, _ = measured("--operations", "all_finite", "--backends", "bad")
    assert code == 1
    assert document["copy_bytes_per_second"] is None


def test_a_backend_that_leaves_all_to_others_has_no_row(measured, backend):
    backend("lazy", sign_pack=lambda *arguments: kernels.sign_pack.reference(*arguments))
    _, document, printed = measured("--operations", "sign_pack", "--backends", "lazy,reference")
    assert [row["backend"] for row in document["rows"]] == ["reference"]
    assert "not measured: sign_pack on lazy for fp32: reference would run" in printed


def test_where_no_backend_does_anything_itself_that_is_said(backend, capsys):
    backend("lazy", sign_pack=lambda *arguments: kernels.sign_pack.reference(*arguments))
    assert main(["kernels", *QUICK, "--operations", "sign_pack", "--backends", "lazy"]) == 2
    assert "nothing was measured: sign_pack on lazy for fp32: reference would run" in capsys.readouterr().err


def test_what_a_backend_leaves_to_others_is_told_with_who_ran(measured, backend):
    own = ("low_rank_left", "low_rank_right", "low_rank_finish", "orthogonalize")
    backend("part", **{name: kernels.operations()[name].implementations["reference"] for name in own})
    backend("more", normalize=kernels.normalize.reference)
    _, document, printed = measured("--operations", "powersgd:rank=1", "--backends", "part")
    (row,) = document["rows"]
    other = kernels.normalize.chosen("cpu")
    assert row["by_others"] == {"normalize": other}
    assert f"part*: normalize by {other}" in printed


def test_the_picture_is_written(measured, tmp_path):
    measured("--operations", "all_finite,sign_pack", "--out", str(tmp_path / "new" / "folder"))
    assert (tmp_path / "new" / "folder" / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_line_in_place_of_the_picture_tells_how_to_get_it(measured, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "gradwire.experiments.kernels.picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, document, printed = measured("--operations", "all_finite", "--out", str(tmp_path / "folder"))
    assert code == 0
    assert document["rows"]
    assert "picture    none: matplotlib is not installed; pip install 'gradwire[experiments]'" in printed


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
    assert "stopped; what had finished is kept" in told.err


def test_a_stop_before_the_first_job_shows_and_writes_nothing(stopped, tmp_path, capsys):
    stopped("sign_pack", signal.SIGINT)
    options = ["--operations", "sign_pack", "--json", str(tmp_path / "figures.json")]
    assert main(["kernels", *QUICK, *options]) == 130
    assert not capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_the_tables_are_shown_where_the_file_cannot_be_written(capsys):
    assert main(["kernels", *QUICK, "--operations", "all_finite", "--json", "/dev/full"]) == 2
    told = capsys.readouterr()
    assert f"{SIZE:,} elements, fp32, 1 thread" in told.out
    assert "cannot write --json /dev/full: No space left on device" in told.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--operations", "topk"], "unknown operation 'topk'; there are: cast_scaled:to=fp16, "),
        (["--operations", "powersgd:rank=3"], "unknown operation 'powersgd:rank=3'"),
        (["--backends", "fortran"], "unknown kernel backend 'fortran'; there are: "),
        (["--backends", "elsewhere"], "'elsewhere' cannot be measured here: it is for cuda tensors"),
        (["--backends", "unbuilt"], "'unbuilt' cannot be measured here: no compiler"),
        (["--sizes", "many"], "sizes are numbers of elements such as 100k, 6.5536M or 1G, got 'many'"),
        (["--sizes", "1k"], "sizes are at least 32768 elements, got 1k"),
        (["--threads", "0"], "threads are at least 1, got 0"),
        (["--repeats", "1"], "repeats is at least 3, got 1"),
        (["--seconds", "-1"], "seconds is at least 0, got -1"),
        (["--dtypes", ""], "dtypes is empty"),
        (["--json", "missing/figures.json"], "json: there is no folder missing"),
        (["--json", "."], "json: . is a folder; name a file, such as figures.json"),
        (["--out", __file__], f"out: {__file__} is a file; name a folder"),
        (["--operations", "powersgd", "--dtypes", "bf16"], "nothing to measure: powersgd:rank=1 of bf16"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(options, message, capsys, monkeypatch):
    for name, device, reason in (("elsewhere", "cuda", ""), ("unbuilt", "cpu", "no compiler")):
        monkeypatch.setitem(dispatch._backends, name, dispatch.Backend(name, device, lambda reason=reason: reason))
    assert main(["kernels", *QUICK, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_cannot_be_asked_for(capsys):
    assert main(["kernels", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_backend_of_a_device_is_right(tmp_path):
    file = tmp_path / "figures.json"
    assert main(["kernels", "--device", "cuda", "--sizes", "1M", "--repeats", "3", "--json", str(file)]) == 0


PER_ELEMENT = {  # bytes, by hand: read and written by the cheapest way there is, of float32 buckets
    "cast_scaled:to=fp16": 4 + 2,
    "cast_scaled:from=bf16": 2 + 4,
    "gather_scaled": 4 + 4,
    "sign_pack": 4 + 4 + 4 + 1 / 8 + 4 / 1024,
    "sign_unpack_mean:voters=2": 2 / 8 + 4 + 2 * 4 / 1024,
    "sign_unpack_mean:voters=4": 4 / 8 + 4 + 4 * 4 / 1024,
    "sign_unpack_mean:voters=8": 8 / 8 + 4 + 8 * 4 / 1024,
    "select_largest": 16,
    "scatter_mean:voters=4": 4 + 4 * 0.01 * 8,
    "powersgd:rank=1": 28,
    "powersgd:rank=4": 28,
    "powersgd:rank=32": 28,
    "low_rank_left:rank=4": 12,
    "low_rank_right:rank=4": 4,
    "low_rank_finish:rank=4": 12,
    "all_finite": 4,
}
NARROWER = {"sign_pack": 10.129, "select_largest": 14, "sign_unpack_mean:voters=8": 3.031, "all_finite": 2}


@pytest.mark.parametrize("name", PER_ELEMENT)
def test_floors_are_those_of_the_cheapest_way(name):
    job = made(named(name), size=2**20)
    assert job.floor_bytes / 2**20 == pytest.approx(PER_ELEMENT[name], rel=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NARROWER)
def test_floors_of_16_bit_gradients_keep_a_residual_of_32_bits(name, dtype):
    job = made(named(name), dtype, size=2**20)
    assert job.floor_bytes / 2**20 == pytest.approx(NARROWER[name], rel=1e-4)


def test_the_floors_of_factors_are_their_own_bytes():
    rows, columns = 2 * (1536 + 512 + 2048 + 512) + 512, 2 * (512 + 512 + 512 + 2048) + 512
    job = made(named("orthogonalize:rank=4"), size=6_553_600)
    assert job.floor_bytes == 2 * 4 * 4 * rows
    assert job.grad.numel() == 6_553_600
    assert made(named("normalize:rank=4"), size=6_553_600).floor_bytes == 2 * 4 * 4 * columns


@pytest.mark.parametrize(("case", "dtype"), EVERY, ids=lambda each: getattr(each, "name", each))
def test_torch_s_operators_do_the_same_job(case, dtype, numbers):
    job = made(case, dtype)
    expected = kept(outcome(job, numbers, "reference"))
    job.run = job.run_baseline
    found = outcome(job, numbers, "reference")
    if case.name == "select_largest":
        order = job.indices[0].argsort()
        found = [Output("indices", job.indices[:, order]), Output("values", job.values[:, order]), found[2]]
    if hasattr(job, "torch_p"):
        found = [by_rows(job, each) for each in found]
    pairs = [pair for pair in zip(expected, found, strict=True) if pair[1] is not None]
    assert pairs
    for wanted, got in pairs:
        exact = not got.values.is_floating_point()
        assert not difference(wanted, Output(got.name, got.values, exact)), got.name


def by_rows(job, output):
    """What the baseline left in factors of its own, in the order of ours; None where it does not do so."""
    factors = {"p": job.torch_p, "q": job.torch_q}
    if output.name in factors:
        return Output(output.name, torch.cat([each.T.reshape(-1) for each in factors[output.name]]))
    if output.name in ("grad", "residual"):
        return output
    if output.name == "projection":
        firsts = zip(job.torch_p, job.factors.left(job.first_p), strict=True)
        return Output(output.name, torch.cat([(first @ p @ p.T).view(-1) for p, first in firsts]))
    return None


def test_what_is_filled_has_a_heavy_tail_no_zeros_and_is_always_different(numbers):
    first, second = torch.zeros(2, SIZE)
    numbers.fill(first)
    numbers.fill(second)
    assert not torch.equal(first, second)
    assert (first != 0).all()
    assert first.abs().max() > 30 * first.abs().median()
    assert first.double().pow(4).mean() / first.double().square().mean() ** 2 > 10


def test_a_restart_repeats_what_was_filled(numbers):
    filled = []
    for seed in (3, 4, 3):
        numbers.restart(seed)
        tensor = torch.zeros(1000, dtype=torch.uint8)
        numbers.fill(tensor)
        filled.append(tensor)
    assert torch.equal(filled[0], filled[2])
    assert not torch.equal(filled[0], filled[1])


@pytest.mark.parametrize(("count", "length"), [(1, 1), (7, 7), (10, 1000), (400, 40_000)])
def test_positions_are_ascending_and_all_different(numbers, count, length):
    out = torch.zeros(3, 1, count, dtype=torch.int32)
    numbers.positions(count, length, out)
    assert (out >= 0).all()
    assert (out < length).all()
    assert (out.diff(dim=-1) > 0).all()


def test_a_result_is_right_up_to_the_rounding_of_sums_and_never_where_it_is_not_a_number():
    wanted = torch.linspace(-1, 1, 1001)
    for value, right in ((1e-6, True), (1e-2, False), (math.nan, False), (math.inf, False)):
        got = wanted.clone()
        got[500] += value
        assert (not difference(Output("x", wanted), Output("x", got))) == right
    one_bit = torch.nextafter(wanted, torch.tensor(2.0))
    assert not difference(Output("x", wanted), Output("x", one_bit))
    assert difference(Output("x", wanted, exact=True), Output("x", one_bit, exact=True))


class Steps:
    """A clock that takes each work's word for its seconds, and writes down who ran."""

    cache_bytes = 0

    def __init__(self):
        self.ran = []

    def seconds(self, work):
        name, seconds = work()
        self.ran.append(name)
        return seconds


def test_racers_take_turns_and_the_slow_do_not_keep_the_fast_waiting(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gradwire.experiments.kernels.race.time.monotonic", lambda: now[0])

    def work(name, seconds):
        now[0] += seconds
        return name, seconds

    clock = Steps()
    speeds = {"slow": 1.0, "fast": 0.1}
    racers = {name: Racer(partial(work, name, each), ("reference",)) for name, each in speeds.items()}
    timings = race(racers, clock, repeats=7, seconds=0.45)
    assert {name: each.repeats for name, each in timings.items()} == {"slow": 3, "fast": 5}
    assert clock.ran == ["slow", "fast", "fast", "slow", "slow", "fast", "fast", "fast"]
    assert timings["slow"].median == 1.0


def test_the_last_level_cache_is_counted_once_for_the_processors_that_share_it(tmp_path):
    for cpu in range(4):
        for level, size in ((1, 32), (2, 512), (3, 32768)):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            folder.mkdir(parents=True)
            shared = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if level == 3 else str(cpu)
            for name, text in (("level", level), ("size", f"{size}K"), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n")
    assert last_level_cache(tmp_path) == 2 * 32768 * 1024
    assert last_level_cache(tmp_path / "none") == clocks.ASSUMED_CACHE


def test_every_operation_and_every_key_of_a_row_is_described():
    page = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text("utf-8")
    names = [*(field.name for field in fields(Row)), *kernels.operations()]
    assert [name for name in names if f"`{name}`" not in page] == []
