"""`gradwire COMMAND --help`: a sentence, examples that are accepted, and every option, the common ones first."""

import re
import shlex
from pathlib import Path

import pytest

from gradwire.experiments.cli import COMMANDS, main
from gradwire.experiments.cli.arguments import fields_of
from gradwire.experiments.cli.parsing import configuration

EXAMPLES = [(name, example) for name, command in COMMANDS.items() for example in command.examples]
SECONDS = ("info", "plan", "trace")  # of a command that is run here: it starts no ranks and waits for nobody


MINE = "mine.py"  # a user's model in examples


def words_of(example):
    launcher, _, words = example.partition("gradwire ")
    assert launcher in ("", "torchrun --nproc-per-node 4 -m ")
    return shlex.split(words)


@pytest.fixture
def beside_a_model(tmp_path, monkeypatch):
    """The folder that a user is in has a model of the user's own."""
    monkeypatch.chdir(tmp_path)
    Path(MINE).touch()


@pytest.fixture(scope="module")
def shown():
    """The help of a command, at 80 columns."""
    texts = {}

    def get(name, capsys):
        if name not in texts:
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main([name, "--help"])
            assert ended.value.code == 0
            texts[name] = capsys.readouterr().out
        return texts[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        yield get


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_option_once_the_common_ones_first(name, shown, capsys):
    text, command = shown(name, capsys), COMMANDS[name]
    fields = fields_of(command.config_class())
    flags = [
        "--" + field.removesuffix(".name").replace("_", "-") for field in fields if field not in command.positional
    ]
    listed = re.findall(r"^  (--[a-z][a-z.-]*)", text, re.MULTILINE)
    assert sorted(listed) == sorted([*flags, "--config", "--print-config"])
    common = ["--" + field.replace("_", "-") for field in command.common]
    assert listed[: len(common)] == common
    assert all(f"  {field.upper()}" in text for field in command.positional)


@pytest.mark.parametrize(("name", "example"), EXAMPLES, ids=[example for _, example in EXAMPLES])
@pytest.mark.usefixtures("beside_a_model")
def test_an_example_is_accepted_as_it_is_printed(name, example):
    given, *options = words_of(example)
    assert given == name
    assert configuration(COMMANDS[name], f"gradwire {name}", options)


@pytest.mark.parametrize("example", [example for name, example in EXAMPLES if name in SECONDS])
def test_an_example_runs_as_it_is_printed(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words_of(example)) == 0
    assert capsys.readouterr().out
