"""Studies: what runs, what is kept, what a point's failure does. Points are stand-ins where figures do not matter."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

from gradwire import __version__
from gradwire.experiments.cli import COMMANDS, main
from gradwire.experiments.cli.parsing import configuration
from gradwire.experiments.cli.study import options_of
from gradwire.experiments.network.lab import NetlabConfig
from gradwire.experiments.network.lab.utilization import Utilization
from gradwire.experiments.sweep import command, picture, run
from gradwire.experiments.sweep.cache import POINTS, Finished, append_point, read_points
from gradwire.experiments.sweep.columns import check_columns
from gradwire.experiments.sweep.config import SweepConfig
from gradwire.experiments.sweep.derive import derived
from gradwire.experiments.sweep.figure import Figure
from gradwire.experiments.sweep.outcome import Outcome
from gradwire.experiments.sweep.points import points_of
from gradwire.experiments.sweep.provenance import command_of, provenance
from gradwire.experiments.sweep.recommendation import Criterion, recommendations
from gradwire.experiments.sweep.rows import link_use, rows_of
from gradwire.experiments.sweep.run import PointFailure, run_point

STUDY = """
title: Pieces
source: a test
command: collective
base: {nproc: 1, total: 1000, repeats: 1}
grid: {elements: [10, 100, 1000]}
shortened: {grid: {elements: [1000]}}
derive: {slowdown: {kind: relative, of: seconds.p50, against: {elements: 1000}}}
figures:
  - {name: pieces, kind: line, x: elements, y: seconds.p50, series: backend, log: [x, y], caption: Smaller is slower.}
"""


@pytest.fixture
def study(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    return file


@pytest.fixture
def ran(monkeypatch):
    """The points that ran, each in no time; those in `fails` fail, those in `columns` have more columns."""

    class Ran(list):
        fails = ()

    found = Ran()
    found.columns = {}

    def stand_in(point, limit):
        found.append(point.chosen["elements"])
        if point.chosen["elements"] in found.fails:
            raise PointFailure("ended with exit code 3: gradwire collective\nthe last line")
        row = {"elements": point.chosen["elements"], "backend": "gloo", "seconds.p50": 1 / point.chosen["elements"]}
        row |= found.columns.get(point.chosen["elements"], {})
        return Finished(point.key(), point.arguments, point.chosen, [row], 0.1, "2026", "0.1.0", {"cores": 2})

    monkeypatch.setattr(command, "run_point", stand_in)
    return found


def sweep(study, out, *flags):
    return main(["sweep", "--config", str(study), f"--out={out}", *flags])


def with_key(line):
    """The study with a line in place of the key that it gives."""
    key = line.partition(":")[0]
    kept, skipping = [], False
    for old in STUDY.strip().splitlines():
        skipping = old.startswith(f"{key}:") or (skipping and old.startswith(" "))
        kept += [] if skipping else [old]
    return "\n".join([*kept, line])


def document(out):
    return json.loads((out / "study.json").read_text())


def test_a_study_runs_every_point_of_the_grid_and_leaves_rows_page_and_pictures(study, ran, tmp_path, capsys):
    out = tmp_path / "out"
    assert sweep(study, out) == 0
    assert ran == [10, 100, 1000]
    assert {file.name for file in out.iterdir()} == {POINTS, "study.json", "README.md", "pieces.png"}
    assert [row["slowdown"] for row in document(out)["rows"]] == pytest.approx([100, 10, 1])
    page = (out / "README.md").read_text()
    assert "![Smaller is slower.](pieces.png)" in page
    assert f"$ gradwire sweep --config FILE --out {out}\n" in page
    assert "$ gradwire collective --nproc=1 --total=1000 --repeats=1 --elements=10" in page
    assert "| 1,000 |" in page.replace("1000", "1,000")
    shown = capsys.readouterr().out
    assert "3 points of gradwire collective, 0 of them already" in shown
    assert "slowdown" in shown


def test_above_a_picture_is_what_was_emulated_in_the_rows_that_it_shows():
    rows = [{"link": rate, "steps": 3, "labels": [f"{rate} links"]} for rate in ("slow", "fast")]
    outcome = Outcome(SweepConfig(title="Links", command="bench"), [], [])
    figure = Figure("slow", "bar", "link", ["steps"], where={"link": "slow"})
    assert figure.shown([*rows, {"link": "slow", "steps": None}]) == rows[:1]
    assert outcome.heading(rows) == "Links\nslow links; fast links"
    assert outcome.heading(figure.shown(rows)) == "Links\nslow links"


def test_a_second_run_computes_only_what_is_missing(study, ran, tmp_path):
    out = tmp_path / "out"
    assert sweep(study, out, "--short") == 0
    assert ran == [1000]
    assert sweep(study, out) == 0
    assert ran == [1000, 10, 100]
    assert [row["elements"] for row in document(out)["rows"]] == [10, 100, 1000]


def test_other_options_are_other_points(study, ran, tmp_path):
    out = tmp_path / "out"
    sweep(study, out, "--short")
    sweep(study, out, "--short", '--base={"nproc": 1, "total": 2000}')
    assert ran == [1000, 1000]


def test_a_failed_point_is_told_and_runs_again_next_time_while_the_others_are_kept(study, ran, tmp_path, capsys):
    out = tmp_path / "out"
    ran.fails = (100,)
    assert sweep(study, out) == 1
    assert "failed: elements 100: ended with exit code 3" in capsys.readouterr().out
    assert list(document(out)["failures"]) == ["elements 100"]
    assert "- failed: elements 100" in (out / "README.md").read_text()
    ran.fails = ()
    assert sweep(study, out) == 0
    assert ran == [10, 100, 1000, 100]
    assert not document(out)["failures"]


def test_ctrl_c_keeps_what_is_done(study, ran, tmp_path, monkeypatch, capsys):
    out, stand_in = tmp_path / "out", command.run_point

    def interrupted(point, limit):
        if point.chosen["elements"] == 100:
            raise KeyboardInterrupt
        return stand_in(point, limit)

    monkeypatch.setattr(command, "run_point", interrupted)
    assert sweep(study, out) == 130
    assert "the points that had finished are kept" in capsys.readouterr().err
    assert len(read_points(out)) == 1
    assert [row["elements"] for row in document(out)["rows"]] == [10]


def test_a_terminal_that_goes_keeps_what_is_done(study, ran, tmp_path, monkeypatch):
    out, stand_in = tmp_path / "out", command.run_point

    def left_alone(point, limit):
        if point.chosen["elements"] == 100:
            os.kill(os.getpid(), signal.SIGHUP)
        return stand_in(point, limit)

    def unhandled(number, frame):
        raise AssertionError("the sweep had no handler")

    monkeypatch.setattr(command, "run_point", left_alone)
    before = signal.signal(signal.SIGHUP, unhandled)
    try:
        assert sweep(study, out) == 130
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [row["elements"] for row in document(out)["rows"]] == [10]


def test_redraw_runs_nothing(study, ran, tmp_path, capsys):
    out = tmp_path / "out"
    assert sweep(study, out, "--redraw") == 2
    assert "there is nothing to draw" in capsys.readouterr().err
    sweep(study, out)
    (out / "pieces.png").unlink()
    assert sweep(study, out, "--redraw") == 0
    assert (out / "pieces.png").exists()
    assert ran == [10, 100, 1000]


def test_the_page_tells_when_and_with_what_the_points_ran_whoever_draws_it(study, tmp_path):
    config = configuration(COMMANDS["sweep"], "", ["--config", str(study)])
    keys = [point.key() for point in points_of(config, options_of)]
    machines = [{"cores": 2, "gpus": []}, {"cores": 4, "torch": "2.8.0"}, {"cores": 2, "gradwire": "0.0.9"}]
    dates = [f"2026-01-0{day} 10:00:00 +0000" for day in (3, 1, 2)]
    told = [("0.1.0", "2.9.0"), ("0.0.9",), ("",)]  # files of before had no torch
    for key, machine, date, versions in zip(keys, machines, dates, told, strict=True):
        gradwire, *torches = versions
        row = {"elements": 1000, "backend": "gloo", "seconds.p50": 1.0}
        append_point(tmp_path, Finished(key, [], {}, [row], 0.1, date, gradwire, machine, *torches))
    assert sweep(study, tmp_path, "--redraw") == 0
    found = document(tmp_path)
    assert (found["gradwire"], found["torch"]) == ("0.1.0, 0.0.9", "2.9.0, 2.8.0")
    assert found["date"] == f"{dates[1]} to {dates[0]}"
    assert found["environment"] == {"cores": "4 / 2", "gpus": []}
    last = (tmp_path / "README.md").read_text().splitlines()[-1]
    assert last == f"{found['date']}, gradwire 0.1.0, 0.0.9, torch 2.9.0, 2.8.0; cores 4 / 2."


def test_points_of_one_day_have_the_date_of_the_last_and_a_point_without_its_torch_has_this_one():
    dates = [f"2026-01-01 1{hour}:00:00 +0000" for hour in (1, 2, 0)]
    told = provenance([Finished("", [], {}, [], 0.1, date, "0.1.0", {}) for date in dates])
    assert (told["date"], told["torch"]) == (dates[1], torch.__version__)


def test_the_command_that_runs_a_study_again_has_its_name_its_form_and_its_lab(tmp_path):
    config = SweepConfig(command="bench", name="my.yaml", short=True, netlab=NetlabConfig(hosts=2, rate="1gbit"))
    command_line = "gradwire sweep --config my.yaml --short --netlab.hosts=2 --netlab.rate=1gbit --out"
    assert command_of(config, tmp_path) == f"{command_line} {tmp_path}"


def test_a_run_that_diverged_is_drawn_and_written_as_far_as_its_losses_go(study, ran, tmp_path):
    curves = {10: [3.0, None, None], 100: [3.0, 2.0, 1.0], 1000: [None, None, None]}
    ran.columns = {size: {"loss": loss, "step": [1, 2, 3]} for size, loss in curves.items()}
    figures = [
        f"  - {{name: loss-{smooth}, kind: line, x: step, y: loss, series: elements, smooth: {smooth}, log: [y]}}\n"
        for smooth in ("true", "false")
    ]
    boxes = "  - {name: losses, kind: box, x: elements, y: loss, series: backend}\n"
    study.write_text(STUDY + "".join([*figures, boxes]))
    out = tmp_path / "out"
    assert sweep(study, out) == 0
    assert {"loss-true.png", "loss-false.png", "losses.png"} <= {file.name for file in out.iterdir()}
    assert [row["loss"] for row in document(out)["rows"]] == list(curves.values())
    assert "(losses.png)" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("grid: {elements: 10}", "grid.elements is a list of values, got 10"),
        ("grid: {element: [10]}", "the point element 10: unknown option --element (did you mean --elements?)"),
        ("grid: {elements: [2000]}", "a piece of 2000 is larger than the total of 1000"),
        ("command: colective", "command is one of bench, collective, compare, ready, got 'colective'"),
        ("derive: {speed: {of: seconds.p50}}", "derive.speed has the unknown kind 'speed'; there are: speedup"),
        ("derive: {speedup: {off: seconds.p50}}", "speedup takes of, against"),
        ("figures: [{name: a, kind: pie, x: b, y: c}]", "kind is one of line, bar, box, got 'pie'"),
        ("figures: [{name: a, kind: bar, x: b}]", "missing 1 required"),
        ("figures: [{name: a, kind: bar, x: b, y: c, log: [z]}]", "log has x and y, got z"),
        ("shortened: {steps: 3}", "shortened has base and grid, got steps"),
        ("base: {netlab.utilization: use.json}", "netlab.utilization is for points of bench"),
        ("grid: {netlab.utilization: [null, use.json]}", "leave it out of collective"),
        ("verdict: {by: seconds}", "it has of, each, unit, what"),
        ("titel: Pieces", "unknown option titel"),
    ],
    ids=lambda value: value.partition(":")[0],
)
def test_what_a_study_says_wrong_is_refused_before_anything_runs(wrong, message, study, ran, tmp_path, capsys):
    study.write_text(with_key(wrong))
    assert sweep(study, tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not ran
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("columns: [elements, second.p50]", "second.p50 (columns)"),
        (
            "derive: {slowdown: {kind: relative, of: seconds.p5, against: {element: 10}}}",
            "seconds.p5 (derive.slowdown), element (derive.slowdown)",
        ),
        (
            "derive: {late: {kind: quotient, of: early, over: elements}, early: {kind: quotient, of: x, over: elements}}",
            "early (derive.late), x (derive.early)",
        ),
        (
            "derive: {seconds_to_target: {kind: time_to_loss, against: {elements: 10}}}",
            "loss (derive.seconds_to_target), train_seconds (derive.seconds_to_target)",
        ),
        (
            "figures: [{name: a, kind: line, x: element, y: p50, series: backends, spread: [low, high], where: {rank: 0}}]",
            "backends (figure a), element (figure a), p50 (figure a), low (figure a), high (figure a), rank (figure a)",
        ),
        ("verdict: {of: second, each: [link]}", "second (verdict), link (verdict), compressor (verdict)"),
    ],
    ids=lambda value: value.partition(":")[0],
)
def test_a_column_that_neither_rows_nor_derivations_have_is_refused_with_those_there_are(wrong, named):
    config = SweepConfig(**yaml.safe_load(with_key(wrong)))
    with pytest.raises(ValueError, match="Mend the study and run it again") as refused:
        check_columns(config, [{"elements": 10, "backend": "gloo", "seconds.p50": 0.1}])
    there = ", ".join(["there are: elements", "backend", "seconds.p50", *config.derive])
    assert f"without columns that the study names: {named}; {there}. " in str(refused.value)


def test_columns_are_checked_at_the_first_rows_and_a_study_that_was_mended_goes_on(study, ran, tmp_path, capsys):
    study.write_text(with_key("columns: [elements, second.p50]"))
    ran.fails = (10,)
    for _ in range(2):
        assert sweep(study, tmp_path) == 2
        assert "second.p50 (columns); there are: elements, backend, seconds.p50, slowdown" in capsys.readouterr().err
        assert ran == [10, 100]
    study.write_text(STUDY)
    ran.fails = ()
    assert sweep(study, tmp_path) == 0
    assert ran == [10, 100, 10, 1000]


def test_a_column_that_some_rows_lack_may_be_named():
    figure = {"name": "use", "kind": "line", "x": "link.seconds", "y": "link.sent_mbit", "series": "bucket_mb"}
    columns = ["compressors", "stretch", "bucket_mb", "later"]
    config = SweepConfig(command="bench", columns=columns, figures=[figure], verdict={"of": "later"})
    check_columns(config, [{"compressor": "none", "bucket_mb": None}, {"later": 1.0}])
    check_columns(config, [])
    with pytest.raises(ValueError, match=r"later \(columns\), later \(verdict\); there are: compressor, bucket_mb\."):
        check_columns(config, [{"compressor": "none", "bucket_mb": None}])


def test_what_was_measured_is_written_before_anything_is_drawn(study, ran, tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no room for a picture")

    monkeypatch.setattr(picture, "draw", broken)
    with pytest.raises(RuntimeError, match="no room"):
        sweep(study, tmp_path)
    assert len(document(tmp_path)["rows"]) == 3
    assert "| 1,000 |" in (tmp_path / "README.md").read_text()


def test_without_matplotlib_a_study_with_figures_is_refused_before_anything_runs(
    study, ran, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert sweep(study, tmp_path / "out") == 2
    assert "matplotlib is not installed; pip install 'gradwire[experiments]'" in capsys.readouterr().err
    assert not ran
    study.write_text(with_key("figures: []"))
    assert sweep(study, tmp_path / "out") == 0
    assert len(document(tmp_path / "out")["rows"]) == 3


def test_a_line_that_a_crash_cut_short_is_left_out_and_does_not_spoil_the_next(tmp_path, caplog):
    whole = [Finished(key, [], {}, [], 1.0, "2026", "0.1.0", {}) for key in "abc"]
    append_point(tmp_path, whole[0])
    append_point(tmp_path, whole[1])
    text = (tmp_path / POINTS).read_text()
    (tmp_path / POINTS).write_text(text[:-20])
    assert list(read_points(tmp_path)) == ["a"]
    assert "line 2 is left out" in caplog.text
    append_point(tmp_path, whole[2])
    assert list(read_points(tmp_path)) == ["a", "c"]


def test_the_points_are_the_product_of_the_grid_in_order():
    config = SweepConfig(
        command="compare", base={"model": {"name": "mlp", "width": 16}}, grid={"lr": [1, 2], "seed": [3, 4]}
    )
    points = points_of(config, options_of)
    assert [tuple(point.chosen.values()) for point in points] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert points[0].arguments == ["compare", "--model.name=mlp", "--model.width=16", "--lr=1", "--seed=3"]
    assert len({point.key() for point in points}) == 4
    assert points[0].options["model"]["width"] == 16


def test_a_lab_may_be_given_for_all_points(study, ran, tmp_path, capsys):
    assert sweep(study, tmp_path / "out", "--netlab.hosts=3", "--netlab.rate=50mbit") == 0
    assert "--netlab.hosts=3 --netlab.rate=50mbit --elements=10" in (tmp_path / "out" / "README.md").read_text()
    study.write_text(STUDY.replace("grid: {elements", "grid: {netlab.rate: [1gbit, 2gbit], elements"))
    assert sweep(study, tmp_path / "other", "--netlab.rate=50mbit") == 2
    assert "the study varies netlab.rate itself" in capsys.readouterr().err


def test_rows_of_bench_and_compare_are_flat_and_know_their_place_on_the_grid():
    measured = {"sec_per_iter": {"p50": 0.5}}
    bench = {"benchmark_results": [{"model": "mlp", "compressor": "none", "measurements": measured}]}
    chosen = {"compressors": "none", "link": "1gbit"}
    assert rows_of("bench", bench, chosen) == [
        {"link": "1gbit", "model": "mlp", "compressor": "none", "sec_per_iter.p50": 0.5}
    ]
    with pytest.raises(ValueError, match="bench measured nothing"):
        rows_of("bench", {"benchmark_results": []}, {})


def test_the_use_of_a_link_is_that_of_the_last_two_steps():
    seconds = [index / 10 for index in range(11)]
    sent = [0, 0, 12500, 12500, 37500, 62500, 62500, 75000, 75000, 75000, 75000]
    use = Utilization("2 hosts at 8mbit", "8mbit", 0.0, seconds, {"0": {"sent_bytes": sent}})
    [row] = link_use([{"sec_per_iter.p50": 0.2}], use)
    assert row["link.seconds"] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert row["link.sent_mbit"] == pytest.approx([0, 2, 2, 0, 1])
    with pytest.raises(ValueError, match="one setting a point, and here are 2: put them in the grid"):
        link_use([{}, {}], use)


def test_a_speedup_is_against_the_row_at_the_same_place():
    rows = [
        {"link": link, "compressor": name, "seconds": seconds}
        for link, name, seconds in [("a", "none", 4.0), ("a", "onebit", 1.0), ("b", "none", 6.0), ("b", "onebit", 3.0)]
    ]
    found = derived(rows, {"speedup": {"of": "seconds", "against": {"compressor": "none"}}}, ["link", "compressor"])
    assert [row["speedup"] for row in found] == [1, 4, 1, 2]


def test_time_to_loss_is_when_the_smoothed_loss_gets_to_the_reference_s_last():
    rows = [
        {"compressor": "bf16", "loss": [2.0, 2.0, 2.0], "train_seconds": [1.0, 2.0, 3.0]},
        {"compressor": "quick", "loss": [3.0, 0.5, 0.5], "train_seconds": [0.1, 0.2, 0.3]},
        {"compressor": "never", "loss": [3.0, 3.0, 3.0], "train_seconds": [0.1, 0.2, 0.3]},
        {"compressor": "broken", "loss": [3.0, None, None], "train_seconds": [0.1, 0.2, 0.3]},
        {"compressor": "untimed", "loss": [3.0, 0.5, 0.5]},
    ]
    found = derived(rows, {"time": {"kind": "time_to_loss", "against": {"compressor": "bf16"}}}, ["compressor"])
    assert [row["time"] for row in found] == [1.0, 0.2, None, None, None]


@pytest.mark.parametrize(
    ("lossy", "expected"),
    [
        (1.0, "a: onebit is 2.0x as fast as bf16: a step takes 1 s, not 2 s."),
        (1.95, "a: do not compress here beyond bf16: a step takes it 2 s, and the best other method, onebit, 1.95 s."),
        (None, "a: do not compress here beyond bf16: no other method gets there at all."),
    ],
)
def test_the_verdict_says_where_not_to_compress(lossy, expected):
    times = {"none": 3.0, "bf16": 2.0, "onebit": lossy}
    rows = [{"link": "a", "compressor": name, "seconds": seconds} for name, seconds in times.items()]
    assert list(recommendations(Criterion("seconds", ["link"]), rows)) == [f"link {expected}"]


def test_a_point_is_a_process_and_its_failure_tells_what_it_wrote():
    config = SweepConfig(command="collective", base={"nproc": 1, "total": 10, "repeats": 1}, grid={"elements": [10]})
    (point,) = points_of(config, options_of)
    finished = run_point(point, limit=100)
    assert finished.rows[0]["elements"] == finished.rows[0]["total_elements"] == 10
    assert finished.rows[0]["seconds.p50"] > 0
    assert finished.environment["cores"] == os.cpu_count()
    assert (finished.gradwire, finished.torch) == (__version__, torch.__version__)
    with pytest.raises(PointFailure, match=r"took longer than 0.2 s: gradwire collective|took longer than 0.2 s"):
        run_point(point, limit=0.2)


def test_what_a_point_refuses_is_in_its_failure(monkeypatch):
    config = SweepConfig(command="compare", base={"model": "mlp", "data": "digits", "batch_size": 5000})
    (point,) = points_of(config, options_of)
    with pytest.raises(PointFailure, match="ended with exit code 2") as failure:
        run_point(point, limit=100)
    assert "samples to train on" in str(failure.value)


def test_a_real_interrupt_ends_the_point_and_its_ranks(tmp_path, study):
    study.write_text(
        STUDY.replace("total: 1000, repeats: 1", "total: 60M, repeats: 1000").replace("nproc: 1", "nproc: 2")
    )
    flags = ["sweep", f"--config={study}", f"--out={tmp_path / 'out'}"]
    process = subprocess.Popen([sys.executable, "-m", "gradwire", *flags], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not descendants(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2)
    started = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert started
    deadline = time.monotonic() + 10  # one that was killed may take a moment to go
    while (left := [pid for pid in started if state(pid) not in ("", "Z")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_point_dies_with_a_sweep_that_is_killed(tmp_path):
    note = tmp_path / "point"
    command = ["sh", "-c", f"echo $$ > {note}.part; mv {note}.part {note}; exec sleep 600"]
    owner = multiprocessing.get_context("fork").Process(target=run._run_to_end, args=(command, 600, tmp_path))
    owner.start()
    deadline = time.monotonic() + 30
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    point = int(note.read_text())
    owner.kill()
    owner.join()
    while state(point) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert state(point) in ("", "Z")


def test_a_second_interrupt_kills_the_point_at_once(monkeypatch):
    def interrupted(timeout=None):
        if timeout is not None:
            raise KeyboardInterrupt
        return wait()

    command = ["sh", "-c", "trap '' INT; echo; exec sleep 600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    with process.stdout:
        process.stdout.readline()  # the trap is set
        wait = process.wait
        monkeypatch.setattr(process, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run._end(process)
    assert process.poll() == -signal.SIGKILL


def stat(pid):
    """Of a process, its state and parent first; nothing where it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def state(pid):
    return "".join(stat(pid)[:1])


def descendants(pid):
    """Processes below a process, of any generation."""
    found = {int(name): stat(name) for name in filter(str.isdigit, os.listdir("/proc"))}
    parents = {process: int(fields[1]) for process, fields in found.items() if fields}
    below, found = {pid}, set()
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found |= below
    return found


def test_trackers_get_the_rows(study, ran, tmp_path):
    pytest.importorskip("tensorboard")
    out = tmp_path / "out"
    assert sweep(study, out, "--logger=tensorboard") == 0
    folders = sorted(file.parent.name for file in (out / "tensorboard").rglob("events.*"))
    assert folders == ["elements_10", "elements_100", "elements_1000"]


def test_rows_that_differ_have_labels_that_differ():
    cases = [{"bucket_mb": size, "overlap": overlap} for size in (None, 0.5, 25) for overlap in (False, True)]
    rows = [{"link": "1gbit", "compressor": "none", **case, "parameter": name} for case in cases for name in "ab"]
    point = Finished("", [], {}, rows, 0.1, "2026", "0.1.0", {})
    found = Outcome(SweepConfig(command="bench", grid={"link": ["1gbit"]}), [], [point]).named_rows
    labels = [label for label, _ in found]
    assert [row for _, row in found] == rows
    assert len(set(labels)) == len(rows)
    assert labels[:3] == ["1gbit none overlap False", "1gbit none overlap False #2", "1gbit none overlap True"]
    assert labels[-1] == "1gbit none bucket_mb 25 overlap True #2"


def test_trackers_get_no_step_without_a_loss(study, ran, tmp_path, monkeypatch):
    steps = []

    class Tracker:
        step, summary = (lambda self, *step: steps.append(step)), (lambda self, numbers, steps: None)

    monkeypatch.setattr(command, "check_loggers", lambda names: None)
    monkeypatch.setattr(command, "open_loggers", lambda names, label, config, out: [Tracker()])
    ran.columns = {1000: {"loss": [3.0, None, 2.0], "train_seconds": [0.1, 0.2, 0.3]}}
    assert sweep(study, tmp_path / "out", "--short", "--logger=wandb") == 0
    assert steps == [(1, 3.0, 0.1), (3, 2.0, 0.3)]
