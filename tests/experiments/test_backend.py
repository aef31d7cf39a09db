"""Which process group the commands choose on a machine with GPUs: NCCL, but never behind links that it goes past."""

import pytest
import torch

from gradwire.experiments.cli import main

DIGITS = ("--model=mlp", "--data=digits")
COMMANDS = {  # its flags, and the function that begins a rank
    "bench": (("--models=tiny",), "gradwire.experiments.bench.command.run_rank"),
    "compare": (DIGITS, "gradwire.experiments.compare.command.run_rank"),
    "collective": ((), "gradwire.experiments.collective.command._rank"),
}
SUPERVISOR = "gradwire.experiments.{}.command.supervised"
LAB = "2 hosts at 1gbit"


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Eight of them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


@pytest.fixture
def chosen(monkeypatch):
    """The process groups that are chosen for ranks which `watch` keeps from running."""
    found = []

    def watch(function):
        def watched(*arguments):
            found.extend(each for each in arguments if each in ("gloo", "nccl"))
            return 0

        monkeypatch.setattr(function, watched)
        return found

    return watch


@pytest.mark.parametrize(("lab", "expected"), [(None, "nccl"), (LAB, "gloo")])
@pytest.mark.parametrize("command", COMMANDS)
def test_ranks_of_a_lab_take_gloo_and_others_the_gpus(command, lab, expected, started, chosen):
    flags, function = COMMANDS[command]
    started(rank=1, ranks=2, lab=lab)
    found = chosen(function)
    assert main([command, *flags]) == 0
    assert found == [expected]


@pytest.mark.parametrize(("link", "expected"), [((), "nccl"), (("--link=1gbit",), "gloo")])
@pytest.mark.parametrize("command", ["bench", "compare"])
def test_ranks_behind_an_emulated_link_take_gloo(command, link, expected, chosen, tmp_path):
    out = (f"--out={tmp_path}",) if command == "compare" else ()
    found = chosen(SUPERVISOR.format(command))
    assert main([command, *COMMANDS[command][0], *link, *out]) == 0
    assert found == [expected]


@pytest.mark.parametrize(
    ("command", "slowed", "told"),
    [
        ("bench", "--link=1gbit", "delays Gloo's collectives, not NCCL's"),
        ("compare", "--link=1gbit", "delays Gloo's collectives, not NCCL's"),
        *((command, "--netlab.hosts=2", "hosts of a lab share this host's GPUs") for command in COMMANDS),
    ],
)
def test_nccl_is_refused_there_before_any_rank_starts(command, slowed, told, monkeypatch, capsys):
    monkeypatch.setattr(SUPERVISOR.format(command), None)
    monkeypatch.setattr("gradwire.experiments.network.lab.launcher.run_on_hosts", None)
    assert main([command, *COMMANDS[command][0], slowed, "--backend=nccl"]) == 2
    shown = capsys.readouterr().err
    assert told in shown
    assert "use --backend gloo" in shown
