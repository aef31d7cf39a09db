from dataclasses import dataclass, field
from typing import Literal

import pytest

from gradwire.experiments.cli import COMMANDS, Command, main


@dataclass(frozen=True)
class Model:
    """What is trained."""

    name: str = "gpt"
    """gpt or mlp"""
    width: int = 64
    """features"""

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"width is at least 1, got {self.width}")


@dataclass(frozen=True)
class Options:
    """Options of a command."""

    model: Model = field(default_factory=Model)
    """what is trained"""
    compressors: list[str] = field(default_factory=lambda: ["none"])
    """specifications"""
    sizes: list[int] = field(default_factory=list)
    """of messages"""
    backend: Literal["gloo", "nccl"] = "gloo"
    """process group"""
    batch_size: int = 8
    """samples"""
    lr: float = 0.1
    """learning rate"""
    out: str | None = None
    """folder"""
    json: bool = False
    """print JSON"""

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size is at least 1, got {self.batch_size}")


seen = []


def record(options: Options):
    seen.append(options)
    return 0


def refuse(options: Options):
    raise ValueError(f"no such folder: {options.out}")


def fill_the_disk(options: Options):
    raise OSError(28, "No space left on device", "a.json")


def command(function, defaults=None):
    return Command("A stand-in.", f"{__name__}:{function.__name__}", defaults=defaults)


def options(*arguments, defaults=None):
    """What the command's function was given."""
    seen.clear()
    assert main(["record", *arguments], {"record": command(record, defaults)}) == 0
    return seen.pop()


@pytest.fixture
def refusal(capsys):
    """The message that a command line is refused with."""

    def get(*arguments, function=record, defaults=None):
        capsys.readouterr()
        assert main([function.__name__, *arguments], {function.__name__: command(function, defaults)}) == 2
        written = capsys.readouterr()
        assert not written.out
        assert written.err.count("\n") == 1
        return written.err.removeprefix(f"gradwire {function.__name__}: error: ").strip()

    return get


@pytest.fixture
def yaml_file(tmp_path):
    def write(text, name="options.yaml"):
        file = tmp_path / name
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--batch-size", "3"], Options(batch_size=3)),
        (["--lr", "1e-3"], Options(lr=0.001)),
        (["--backend", "nccl"], Options(backend="nccl")),
        (["--json"], Options(json=True)),
        (["--json", "--batch-size", "3"], Options(json=True, batch_size=3)),
        (["--json", "false"], Options()),
        (["--out", "runs/a=b"], Options(out="runs/a=b")),
        (["--out", "null"], Options()),
        (["--out", "a: b"], Options(out="a: b")),
        (["--out", "[a]"], Options(out="[a]")),
        (["--model.width", "8"], Options(model=Model(width=8))),
        (["--model", "mlp"], Options(model=Model(name="mlp"))),
        (["--model", "mlp", "--model.width=8"], Options(model=Model("mlp", 8))),
        (
            ["--compressors", "none,topk:ratio=0.1,seed=1,onebit"],
            Options(compressors=["none", "topk:ratio=0.1,seed=1", "onebit"]),
        ),
        (["--compressors", "[none, onebit]"], Options(compressors=["none", "onebit"])),
        (["--sizes", "1,20"], Options(sizes=[1, 20])),
        (["--batch-size", "3", "--batch-size", "4"], Options(batch_size=4)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_field_is_a_flag(arguments, expected):
    assert options(*arguments) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch_size: 3", Options(batch_size=3)),
        ("batch-size: 3", Options(batch_size=3)),
        ("lr: 1e-3", Options(lr=0.001)),
        ("json: true", Options(json=True)),
        ("out: null", Options()),
        ("model: mlp", Options(model=Model(name="mlp"))),
        ("model: {name: mlp, width: 8}", Options(model=Model("mlp", 8))),
        ("compressors: [none, 'topk:ratio=0.1,seed=1']", Options(compressors=["none", "topk:ratio=0.1,seed=1"])),
        ("compressors: none,onebit", Options(compressors=["none", "onebit"])),
        ("sizes: [1, 20]", Options(sizes=[1, 20])),
        ("sizes: []", Options()),
        ("", Options()),
    ],
)
def test_every_field_is_a_yaml_key(yaml_file, text, expected):
    assert options("--config", str(yaml_file(text))) == expected


def test_what_is_written_later_wins(yaml_file):
    first = str(yaml_file("{model: {name: mlp, width: 8}, batch_size: 3}"))
    second = str(yaml_file("batch_size: 5", "second.yaml"))
    assert options("--config", first, "--batch-size", "4") == Options(model=Model("mlp", 8), batch_size=4)
    assert options("--batch-size", "4", "--config", first).batch_size == 3
    assert options("--config", first, f"--config={second}") == Options(model=Model("mlp", 8), batch_size=5)


def test_the_default_file_is_read_where_no_other_is_given(yaml_file):
    shipped, own = yaml_file("{batch_size: 3, model: mlp}"), yaml_file("lr: 2", "own.yaml")
    assert options(defaults=shipped) == Options(batch_size=3, model=Model("mlp"))
    assert options("--batch-size", "4", defaults=shipped) == Options(batch_size=4, model=Model("mlp"))
    assert options("--config", str(own), defaults=shipped) == Options(lr=2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "x"], "--batch-size takes a whole number, got 'x'"),
        (["--lr", "fast"], "--lr takes a number, got 'fast'"),
        (["--backend", "mpi"], "--backend takes gloo or nccl, got 'mpi'"),
        (["--json=perhaps"], "--json takes true or false, got 'perhaps'"),
        (["--sizes", "1,x"], "--sizes takes items separated by commas, each a whole number, got '1,x'"),
        (["--batch-size"], "--batch-size needs a value: a whole number"),
        (["--config"], "--config needs a value: text"),
        (["--batch-size", "0"], "batch_size is at least 1, got 0"),
        (["--model.width", "0"], "width is at least 1, got 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_refused_with_what_is_allowed(refusal, arguments, message):
    assert refusal(*arguments) == message


def test_an_unknown_flag_is_refused_with_those_there_are(refusal):
    assert refusal("--bach-size", "3") == (
        "unknown option --bach-size (did you mean --batch-size?); there are: --model, --model.width, --compressors, "
        "--sizes, --backend, --batch-size, --lr, --out, --json"
    )
    assert refusal("--model.wdth", "3") == (
        "unknown option --model.wdth (did you mean --model.width?); there are: --model.name, --model.width"
    )
    assert "unexpected argument 'onebit'" in refusal("--compressors", "none,", "onebit")


def test_a_wrong_file_is_refused_with_its_name(refusal, yaml_file, tmp_path):
    unknown, value = yaml_file("model: {wdth: 3}"), yaml_file("batch_size: x", "value.yaml")
    listed, broken = yaml_file("[1, 2]", "list.yaml"), yaml_file("a: [", "broken.yaml")
    assert f"unknown option model.wdth in {unknown} (did you mean model.width?)" in refusal("--config", str(unknown))
    assert refusal("--config", str(value)) == f"batch_size in {value} takes a whole number, got 'x'"
    assert f"{listed} holds list, not a mapping" in refusal("--config", str(listed))
    assert f"cannot read --config {broken}" in refusal("--config", str(broken))
    assert "No such file" in refusal("--config", str(tmp_path / "missing.yaml"))
    assert f"batch_size in {value}" in refusal(defaults=value)


def test_an_error_of_the_system_is_shown_in_one_line(refusal):
    assert refusal(function=fill_the_disk) == "[Errno 28] No space left on device: 'a.json'"


def test_help_shows_the_defaults_that_hold(capsys, yaml_file):
    shipped = yaml_file("{batch_size: 31, model: {width: 77}}")
    with pytest.raises(SystemExit):
        main(["record", "--help"], {"record": command(record, shipped)})
    shown = " ".join(capsys.readouterr().out.split())
    assert "default: 31" in shown
    assert "default: 77" in shown
    assert "the shipped options.yaml" in shown


@pytest.mark.parametrize(("typed", "meant"), [("compair", "compare"), ("kernel", "kernels"), ("net-lab", "netlab")])
def test_an_unknown_command_is_refused_with_the_one_that_is_meant_and_those_there_are(typed, meant, capsys):
    assert main([typed]) == 2
    message = capsys.readouterr().err
    assert f"unknown command {typed!r} (did you mean {meant!r}?)" in message
    assert message.count("\n") == 1
    assert all(name in message for name in COMMANDS)


@pytest.mark.parametrize(("rank", "local_rank"), [(0, 0), (1, 1), (2, 0)])
def test_of_torchruns_ranks_one_prints_what_is_refused_and_one_of_each_host_what_its_system_refuses(
    rank, local_rank, monkeypatch, capsys
):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    commands = {function.__name__: command(function) for function in (record, refuse, fill_the_disk)}
    with pytest.raises(SystemExit, match="2"):
        main(["--traim"], commands)
    assert bool(capsys.readouterr().err) == (rank == 0)
    for arguments in (["traim"], ["record", "--lr=fast"], ["refuse"], ["fill_the_disk"]):
        assert main(arguments, commands) == 2
        shown = capsys.readouterr().err
        assert bool(shown) == (local_rank == 0 if arguments == ["fill_the_disk"] else rank == 0)
