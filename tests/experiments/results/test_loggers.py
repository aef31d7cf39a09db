import json
import sys
from types import SimpleNamespace

import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.ranks.launchers import LAB_VARIABLE
from gradwire.experiments.results.loggers import LOGGERS, check_loggers, log

from ...forked import Script
from ..given import run_of

SPECS = ("onebit", "topk:ratio=0.1")
LOG = """
import sys
from pathlib import Path
import wandb
from gradwire.experiments.results.loggers import PATIENCE, log
from tests.experiments.given import run_of

for spec in SPECS:
    log(["wandb"], spec, run_of(spec), {"steps": 2}, Path(sys.argv[1]))
assert PATIENCE.keys() <= wandb.Settings.model_fields.keys()
"""


def logged(names, spec, out):
    """A run of two steps."""
    log(names, spec, run_of(spec, loss=(2.0, 1.0)), {"steps": 2}, out)


def scalars(folder):
    """All that TensorBoard reads in a folder: by name the steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.mark.thorough
def test_without_a_key_wandb_keeps_a_run_of_each_compressor_in_the_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    done = Script(LOG.replace("SPECS", repr(SPECS)), out).end()
    assert done.code == 0, done.errors
    folders = sorted((out / "wandb").glob("offline-run-*"))
    assert len(folders) == len(SPECS)
    content = [b"".join(file.read_bytes() for file in folder.glob("*.wandb")) for folder in folders]
    for spec in SPECS:
        assert sum(spec.encode() in each for each in content) == 1
    assert all(b"compression_ratio" in each and b"loss" in each for each in content)


class Wandb:
    """The library, with a key: the starts of its runs, of which those online raise `error`."""

    def __init__(self):
        self.starts, self.error = [], None
        self.Settings = lambda **settings: settings
        self.Settings.model_fields = {"init_timeout"}

    def init(self, *, mode, **options):
        self.starts.append((mode, options))
        if mode == "online" and self.error:
            raise self.error
        return SimpleNamespace(log=lambda *figures, step: None, summary={}, finish=lambda: None)

    @property
    def modes(self):
        return [mode for mode, _ in self.starts]


@pytest.fixture
def wandb(monkeypatch):
    library = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "")  # restored at the end, whatever is set meanwhile
    for name in ("WANDB_MODE", "WANDB_INIT_TIMEOUT", LAB_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return library


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, "online"),
        ({LAB_VARIABLE: "2 hosts"}, "offline"),
        ({LAB_VARIABLE: "2 hosts", "WANDB_MODE": "online"}, "online"),
        ({"WANDB_MODE": "disabled"}, "disabled"),
    ],
)
def test_wandb_is_offline_in_a_lab_unless_the_user_says_otherwise(variables, mode, wandb, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    logged(["wandb"], "onebit", tmp_path)
    assert wandb.modes == [mode]


def test_where_wandb_cannot_be_reached_runs_are_kept_offline_after_one_warning(wandb, tmp_path, caplog):
    wandb.error = TimeoutError("no answer\n  within 15 s")
    for spec in SPECS:
        logged(["wandb"], spec, tmp_path)
    assert wandb.modes == ["online", "offline", "offline"]
    (warning,) = caplog.messages
    assert warning == (
        "wandb does not start online (TimeoutError: no answer within 15 s): runs are kept offline in "
        f"{tmp_path / 'wandb'}, and `wandb sync` sends them later"
    )


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
    expected = {
        "train/loss": run["loss"][-1],
        **{
            f"{part}/{name}": value for part in ("eval", "seconds", "step_seconds") for name, value in run[part].items()
        },
        **{name: run[name] for name in ("payload_bytes_per_step", "sent_bytes_per_step", "compression_ratio")},
    }
    assert {name: found[name] for name in expected} == {
        name: [(23, pytest.approx(expected[name]))] for name in expected
    }


def test_an_unknown_logger_is_refused_with_those_there_are(tmp_path, capsys):
    with pytest.raises(ValueError, match="unknown logger 'wand'; there are: wandb, tensorboard"):
        check_loggers(["wand"])
    assert main(["compare", "--logger", "wand", "--out", str(tmp_path / "out")]) == 2
    assert "unknown logger 'wand'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_that_is_not_installed_is_refused_with_the_way_to_get_it(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["compare", "--logger", name, "--out", str(tmp_path / "out")]) == 2
    assert f"{name} is not installed; pip install 'gradwire[{name}]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
