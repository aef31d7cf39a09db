import json

import pytest

from gradwire.experiments.cli import main


def row(ddp="gradwire", world_size=2, seconds=0.1, model="resnet50", **changed):
    return {
        "model": model,
        "batch_size": 32,
        "world_size": world_size,
        "machines": 1,
        "ranks_per_machine": world_size,
        "ddp": ddp,
        "compressor": "none",
        "bucket_mb": None,
        "process_groups": 1,
        "sync_every": 1,
        "overlap": True,
        "order": "backward",
        "measurements": {
            "sec_per_iter": {
                name: seconds * (1 + index / 10) for index, name in enumerate(("p50", "p75", "p90", "p95"))
            },
            "ex_per_sec": dict.fromkeys(("p50", "p75", "p90", "p95"), 32 / seconds),
        },
        **changed,
    }


@pytest.fixture
def file(tmp_path):
    """Write a file of the benchmark."""

    def write(name, *rows, config=None, **changed):
        document = {
            "kind": "bench",
            "gradwire": "0.1.0",
            "torch": "2.15.0",
            "environment": {"processor": "some", "cuda": None},
            "config": {"steps": 10, "json": name, "bucket_mb": [], **(config or {})},
            "labels": [],
            "rows": list(rows),
            **changed,
        }
        path = tmp_path / name
        path.write_text(json.dumps(document))
        return str(path)

    return write


def table(shown):
    """The cells of the last table's rows."""
    last = shown.rpartition("\u250f")[2]
    return [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in last.splitlines() if "\u2502" in line]


def test_the_table_has_the_seconds_of_both_and_by_how_much_they_differ(file, capsys):
    base = file("a.json", row("none", 1, 0.1), row(world_size=2, seconds=0.2), row(model="vgg19", seconds=0.4))
    test = file("b.json", row("none", 1, 0.1), row(world_size=2, seconds=0.1), row(model="vgg19", seconds=0.5))
    assert main(["diff", base, test]) == 0
    shown = capsys.readouterr().out
    assert table(shown) == [
        ["resnet50", "32", "1 rank no ddp", "0.110 s", "0.110 s", "+0.0%", "0.130 s", "0.130 s", "+0.0%"],
        ["resnet50", "32", "2 ranks 1M/2G", "0.220 s", "0.110 s", "+50.0%", "0.260 s", "0.130 s", "+50.0%"],
        ["vgg19", "32", "2 ranks 1M/2G", "0.440 s", "0.550 s", "-25.0%", "0.520 s", "0.650 s", "-25.0%"],
    ]
    assert "+ is faster" in shown


@pytest.mark.parametrize(("percent", "code"), [("5", 1), ("9.9", 1), ("11", 0), ("50", 0)])
def test_a_regression_fails_over_the_percentage(file, capsys, percent, code):
    base, test = file("a.json", row(seconds=0.1)), file("b.json", row(seconds=0.11))
    assert main(["diff", base, test, "--fail-over", percent]) == code
    shown = capsys.readouterr().out
    assert ("REGRESSION: resnet50, 2 ranks 1M/2G, batch size 32: " in shown) == bool(code)
    assert ("grown by 10.0 %" in shown) == bool(code)
    assert main(["diff", base, test]) == 0
    assert main(["diff", test, base, "--fail-over", "0"]) == 0  # faster


def test_what_the_test_lacks_is_a_regression_where_one_is_looked_for(file, capsys):
    rows = [row(world_size=2), row(world_size=4, model="vgg19")]
    base, test = file("a.json", *rows), file("b.json", rows[0])
    assert main(["diff", base, test]) == 0
    assert "REGRESSION" not in capsys.readouterr().out
    assert main(["diff", base, test, "--fail-over", "5"]) == 1
    assert "REGRESSION: vgg19, 4 ranks 1M/4G, batch size 32 is missing in the test" in capsys.readouterr().out
    assert main(["diff", test, base, "--fail-over", "5"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "JSONDecodeError"),
        ('{"kind": "compare"}', "its kind is compare"),
        ('{"kind": "bench", "rows": []}', "its benchmark ended before the first row"),
        ('{"kind": "bench", "rows": [{"model": "x"}]}', "KeyError 'ddp'"),
    ],
)
def test_a_file_of_another_kind_is_refused(file, tmp_path, capsys, text, message):
    other = tmp_path / "other.json"
    if text is not None:
        other.write_text(text)
    assert main(["diff", file("a.json", row()), str(other)]) == 2
    written = capsys.readouterr().err
    assert message in written
    assert "other.json is no file of gradwire bench --json" in written


def test_wrong_arguments_are_refused(file, capsys):
    base = file("a.json", row())
    other = file("b.json", row(model="vgg19"))
    for arguments, message in (
        ([base], "gradwire diff BASE.json TEST.json"),
        ([base, base, base], "unexpected argument"),
        ([base, other], "have no model, batch size and number of ranks in common"),
        ([base, base, "--fail-over", "-1"], "fail_over is a number of percent, at least 0, got -1"),
    ):
        assert main(["diff", *arguments]) == 2
        assert message in capsys.readouterr().err
