"""`gradwire COMMAND --help`: a sentence, examples that are accepted, and every option, the common ones first."""

import re
import shlex
from pathlib import Path

import pytest

from gradwire.experiments.cli import COMMANDS, main
from gradwire.experiments.cli.arguments import fields_of
from gradwire.experiments.cli.parsing import configuration

LONGEST_SENTENCE = 30  # words
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
def test_help_opens_with_a_short_usage_one_sentence_and_two_examples(name, shown, capsys):
    usage, sentence, examples, *_ = shown(name, capsys).split("\n\n")
    assert usage.startswith(f"usage: gradwire {name} [options]")
    assert "\n" not in usage
    assert " ".join(sentence.split()) == COMMANDS[name].help
    assert re.fullmatch(r"[A-Z][^\n]*[a-zC)]\.", COMMANDS[name].help)
    assert len(sentence.split()) <= LONGEST_SENTENCE
    heading, *lines = examples.splitlines()
    assert heading == "examples:"
    assert tuple(line.strip() for line in lines) == COMMANDS[name].examples
    assert len(lines) >= 2


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


@pytest.mark.parametrize("name", COMMANDS)
def test_laboratory_options_stand_in_a_group_of_their_own_behind_the_others(name, shown, capsys):
    before, heading, behind = shown(name, capsys).partition("\n\nlaboratory options")
    if any(field.startswith("netlab.") for field in fields_of(COMMANDS[name].config_class())):
        assert heading
    assert "\n  --netlab" not in before
    assert "more options" not in behind


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_s_text_is_understood_without_its_name(name, shown, capsys):
    """No text begins with a preposition or an article's fragment, which would complete the option's name."""
    text = " ".join(shown(name, capsys).split("\n\noptions of every command")[0].split())
    told = re.findall(r" --[a-z][a-z.-]*(?: \{[^}]*\}| [A-Z][A-Z,.-]*)? ((?!--)\S+)", text.partition("options:")[2])
    assert not set(told) & {"of", "in", "that", "whose", "which", "whether", "who", "behind", "by", "for", "so"}


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


def test_the_help_of_all_commands_names_each_with_its_sentence(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert re.search(rf"^ +{name}\s+{re.escape(command.help)}$", text, re.MULTILINE)
    for example in re.findall(r"^  (gradwire .*)$", text, re.MULTILINE):
        name, *options = words_of(example)
        assert configuration(COMMANDS[name], f"gradwire {name}", options)
