from dataclasses import dataclass, field

from gradwire.experiments.cli import Command, main


@dataclass(frozen=True)
class Files:
    """Two files."""

    base: str = ""
    """the first"""
    test: str = ""
    """the second"""
    verbose: bool = False
    """tell more"""


@dataclass(frozen=True)
class Run:
    """A command to run."""

    hosts: int = 1
    """how many"""
    command: list[str] = field(default_factory=list)
    """what to run"""


seen = []


def record(options: Files):
    seen.append(options)
    return 0


def run(options: Run):
    return record(options)


FILES = {"files": Command("two", f"{__name__}:record", positional=("base", "test"))}
RUN = {"run": Command("run", f"{__name__}:run", positional=("command",))}


def options(commands, *arguments):
    seen.clear()
    assert main([*commands, *arguments], commands) == 0
    return seen.pop()


def test_arguments_without_a_flag_go_to_the_positional_fields_in_order():
    assert options(FILES, "a.json", "b.json") == Files("a.json", "b.json")
    assert options(FILES, "a.json", "--verbose", "b=c.json") == Files("a.json", "b=c.json", verbose=True)
    assert options(FILES, "--", "--a", "--b") == Files("--a", "--b")
    assert options(FILES, "--base", "a.json") == Files("a.json")
    assert options(FILES) == Files()


def test_a_list_at_the_end_takes_the_rest_as_it_is_written():
    assert options(RUN, "one", "--hosts", "3", "two,three") == Run(3, ["one", "two,three"])
    words = ["python", "train.py", "--config", "x.yaml", "--lr=3", "-h", "--help", "4", "--", "[a]", "--print-config"]
    assert options(RUN, "--hosts", "2", "--", *words) == Run(2, words)
    assert options(RUN) == Run()


def test_an_argument_too_many_is_refused_with_what_the_command_takes(capsys):
    assert main(["files", "a", "b", "c"], FILES) == 2
    assert "unexpected argument 'c'; this command takes BASE TEST" in capsys.readouterr().err
