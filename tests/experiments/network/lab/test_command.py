import pytest

from gradwire.experiments.cli import main


@pytest.mark.parametrize(
    ("arguments", "told_of"),
    [
        ([], "give a command behind --"),
        (["--", "ls"], "hosts is at least 1"),
        (["--hosts=100", "--", "ls"], "0 to 99"),
        (["--hosts=2", "--rate=fast", "--", "ls"], "such as 100mbit"),
        (
            ["--hosts=2", "--delay=30", "--", "ls"],
            "a delay or jitter is a number and a unit, us, ms or s, such as 30ms; got '30'",
        ),
        (["--hosts=2", "--loss=0.1", "--", "ls"], "a percentage from 0% to below 100%, such as 0.1%; got '0.1'"),
        (["--hosts=2", "--", "no-such-command"], "no such command"),
        (["--hosts=2", "--utilization=/nowhere/file.json", "--", "ls"], "utilization: there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, told_of, capsys):
    assert main(["netlab", *arguments]) == 2
    assert told_of in capsys.readouterr().err
