import torch

from gradwire.experiments.cli import COMMANDS
from gradwire.experiments.cli.parsing import configuration
from gradwire.experiments.cli.study import options_of
from gradwire.experiments.network.lab import NetlabConfig
from gradwire.experiments.sweep.cache import Finished, append_point
from gradwire.experiments.sweep.config import SweepConfig
from gradwire.experiments.sweep.points import points_of
from gradwire.experiments.sweep.provenance import command_of, provenance

from .given import document, sweep


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
