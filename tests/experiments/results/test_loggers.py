import json
import sys

import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.results.loggers import LOGGERS, log

from ..given import run_of


def logged(names, spec, out):
    """A run of two steps."""
    log(names, spec, run_of(spec, loss=(2.0, 1.0)), {"steps": 2}, out)


def scalars(folder):
    """All that TensorBoard reads in a folder: by name the steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_a_tracker_that_fails_is_told_of_in_one_warning_and_the_others_go_on(tmp_path, caplog, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    seen = []
    monkeypatch.setitem(LOGGERS, "broken", fail)
    monkeypatch.setitem(LOGGERS, "whole", lambda name, run, config, out: seen.append((name, run.steps, config)))
    logged(["broken", "whole"], "none", tmp_path)
    assert seen == [("none", 2, {"steps": 2, "compressor": "none"})]
    assert caplog.messages == ["broken did not log all of none: OSError: [Errno 28] No space left on device"]


def test_the_trackers_of_compare_get_the_numbers_of_results_json(started, undrawn, tmp_path):
    pytest.importorskip("tensorboard")
    started()
    flags = ["--model=mlp", "--data=digits", "--steps=23", "--eval-batches=1", "--compressors=topk:ratio=0.1"]
    assert main(["compare", *flags, "--logger=tensorboard", f"--out={tmp_path}"]) == 0
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    found = scalars(tmp_path / "tensorboard" / "topk_ratio=0.1")
    steps = list(range(1, 24))
    for name, values in (("loss", run["loss"]), ("seconds", run["train_seconds"])):
        assert [step for step, _ in found[name]] == steps
        assert [value for _, value in found[name]] == pytest.approx(values)
    expected = {name: run[name] for name in ("payload_bytes_per_step", "sent_bytes_per_step", "compression_ratio")}
    for part in ("eval", "seconds", "step_seconds"):
        expected |= {f"{part}/{name}": value for name, value in run[part].items()}
    for name, value in {"train/loss": run["loss"][-1], **expected}.items():
        assert found[name] == [(23, pytest.approx(value))], name


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_that_is_not_installed_is_refused_with_the_way_to_get_it(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["compare", "--logger", name, "--out", str(tmp_path / "out")]) == 2
    assert f"{name} is not installed; pip install 'gradwire[{name}]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
