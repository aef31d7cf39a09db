import json
import re

import pytest

from gradwire.experiments.cli import main

LINE = (
    r" +(\d+) ranks? +-- +(no ddp|\dM/\dG):(.*) "
    r" p75: +([\d.]+)s +([\d.]+)/s +([-+][\d.]+)%  p95: +([\d.]+)s +([\d.]+)/s +([-+][\d.]+)%"
)


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
            "pytorch_version": "2.15.0",
            "cuda_version": None,
            "distributed_backend": "gloo",
            "gradwire_version": "0.1.0",
            "environment": {"processor": "some", "topology": "long"},
            "config": {"steps": 10, "json": name, "bucket_mb": [], **(config or {})},
            "labels": [],
            "benchmark_results": list(rows),
            **changed,
        }
        path = tmp_path / name
        path.write_text(json.dumps(document))
        return str(path)

    return write


def lines(shown):
    return [found.groups() for line in shown.splitlines() if (found := re.fullmatch(LINE, line))]


def test_the_table_has_pytorchs_columns(file, capsys):
    base = file("a.json", row("none", 1, 0.1), row(world_size=2, seconds=0.2), row(model="vgg19", seconds=0.4))
    test = file("b.json", row("none", 1, 0.1), row(world_size=2, seconds=0.1), row(model="vgg19", seconds=0.5))
    assert main(["diff", base, test]) == 0
    shown = capsys.readouterr().out
    headings = [line.split() for line in shown.splitlines() if "sec/iter" in line and "diff" in line.split()]
    assert headings == [["sec/iter", "ex/sec", "diff"] * 2] * 2
    heading, first = (next(line for line in shown.splitlines() if piece in line) for piece in (" diff  ", " no ddp:"))
    ends = [found.end() for found in re.finditer("sec/iter|ex/sec|diff", heading)]
    assert ends == [found.end() for found in re.finditer(r"[\d.]+(s|/s|%)(?= |$)", first)]
    assert "Benchmark: resnet50 with batch size 32" in shown
    assert "Benchmark: vgg19 with batch size 32" in shown
    assert [(count, place, one, other) for count, place, _, _, _, one, _, _, other in lines(shown)] == [
        ("1", "no ddp", "+0.0", "+0.0"),
        ("2", "1M/2G", "+50.0", "+50.0"),
        ("2", "1M/2G", "-25.0", "-25.0"),
    ]
    assert lines(shown)[1][3] == "0.110"  # the seconds of the test
    assert "+ is faster" in shown


def test_the_configurations_stand_side_by_side(file, capsys):
    base = file("a.json", row(), config={"bucket_mb": [25.0]})
    test = file("b.json", row(bucket_mb=1.0), config={"bucket_mb": [1.0]}, pytorch_version="2.8.0")
    assert main(["diff", base, test]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"baseline +test\n +-+ +-+\n", shown)
    assert re.search(r"config.bucket_mb: +25.0  vs +1.0\n", shown)
    assert re.search(r"pytorch_version: +2.15.0  vs +2.8.0\n", shown)
    assert re.search(r"cuda_version: +None  vs +None\n", shown)
    assert "steps" not in shown  # the same in both
    assert "b.json" not in shown
    assert len(lines(shown)) == 1  # a setting that each file has once may differ


def test_settings_that_one_file_has_several_of_are_matched(file, capsys):
    several = [row(compressor=spec, seconds=seconds) for spec, seconds in (("none", 0.2), ("onebit", 0.1))]
    base, test = file("a.json", *several), file("b.json", several[1])
    assert main(["diff", base, test]) == 0
    shown = capsys.readouterr().out
    ((_, _, settings, *figures),) = lines(shown)
    assert settings.strip() == "onebit"
    assert figures[2] == "+0.0"
    assert "only in the baseline: resnet50, 2 ranks --    1M/2G, batch size 32, none" in shown


@pytest.mark.parametrize(("percent", "code"), [("5", 1), ("9.9", 1), ("11", 0), ("50", 0)])
def test_a_regression_fails_over_the_percentage(file, capsys, percent, code):
    base, test = file("a.json", row(seconds=0.1)), file("b.json", row(seconds=0.11))
    assert main(["diff", base, test, "--fail-over", percent]) == code
    shown = capsys.readouterr().out
    assert ("REGRESSION: resnet50 with batch size 32" in shown) == bool(code)
    assert ("grown by 10.0 %" in shown) == bool(code)
    assert main(["diff", base, test]) == 0
    assert main(["diff", test, base, "--fail-over", "0"]) == 0  # faster


def test_what_the_test_lacks_is_a_regression_where_one_is_looked_for(file, tmp_path, capsys):
    rows = [row(world_size=2), row(world_size=4, model="vgg19")]
    base, test, page = file("a.json", *rows), file("b.json", rows[0]), tmp_path / "diff.html"
    told = "REGRESSION: vgg19, 4 ranks --    1M/4G, batch size 32 is missing in the test"
    assert main(["diff", base, test]) == 0
    assert "REGRESSION" not in capsys.readouterr().out
    assert main(["diff", base, test, "--fail-over", "5", "--html", str(page)]) == 1
    assert told in capsys.readouterr().out
    assert told in page.read_text()
    assert main(["diff", test, base, "--fail-over", "5"]) == 0


def test_one_rank_without_ddp_may_be_missing(file):
    base, test = file("a.json", row("none", 1), row()), file("b.json", row())
    assert main(["diff", base, test, "--fail-over", "5"]) == 0


@pytest.mark.parametrize("labels", [(["emulated link 1gbit"],) * 2, (["emulated link 1gbit"], []), ([], [])])
def test_what_was_emulated_is_told_where_it_is_the_same_in_both_too(file, tmp_path, capsys, labels):
    base, test = (file(name, row(), labels=each) for name, each in zip(("a.json", "b.json"), labels, strict=True))
    page = tmp_path / "diff.html"
    assert main(["diff", base, test, "--html", str(page)]) == 0
    for text in (capsys.readouterr().out, page.read_text()):
        assert text.count("emulated link 1gbit") == sum(map(bool, labels))
        assert ("not real" in text) == any(labels)


def test_one_rank_without_ddp_is_no_regression(file):
    base, test = (file(name, row("none", 1, s), row()) for name, s in (("a.json", 0.1), ("b.json", 0.3)))
    assert main(["diff", base, test, "--fail-over", "5"]) == 0


def test_the_page_holds_the_same_and_needs_nothing_beside_it(file, tmp_path):
    base, test = file("a.json", row(seconds=0.1)), file("b.json", row(seconds=0.2), pytorch_version="<3>")
    page = tmp_path / "diff.html"
    assert main(["diff", base, test, "--html", str(page), "--fail-over", "5"]) == 1
    text = page.read_text()
    for piece in ("a.json", "b.json", "resnet50 with batch size 32", "-100.0%", "REGRESSION", "&lt;3&gt;"):
        assert piece in text
    assert "http" not in text
    assert "src=" not in text


def test_files_of_pytorchs_benchmark_are_read(tmp_path, capsys):
    def pytorchs(name, seconds):
        results = [{"ranks": list(range(count)), "measurements": [seconds] * 10} for count in (1, 1, 2, 16)]
        document = {
            "pytorch_version": "1.4",
            "cuda_version": "10.0",
            "distributed_backend": "nccl",
            "bucket_size": 25,
            "benchmark_results": [{"model": "resnet50", "batch_size": 32, "result": results}],
        }
        (tmp_path / name).write_text(json.dumps(document))
        return str(tmp_path / name)

    assert main(["diff", pytorchs("a.json", 0.1), pytorchs("b.json", 0.101), "--fail-over", "2"]) == 0
    shown = capsys.readouterr().out
    assert [found[:2] for found in lines(shown)] == [("1", "no ddp"), ("1", "1M/1G"), ("2", "1M/2G"), ("16", "2M/8G")]
    assert {found[5] for found in lines(shown)} == {"-1.0"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("{", "cannot read"),
        ("[]", "has no benchmark_results"),
        ('{"benchmark_results": []}', "has no results"),
        ('{"benchmark_results": [{"model": "x"}]}', "KeyError 'batch_size'"),
        ('{"kind": "bench", "benchmark_results": [3]}', "is no file of gradwire bench"),
    ],
)
def test_a_file_of_another_kind_is_refused(file, tmp_path, capsys, text, message):
    other = tmp_path / "other.json"
    if text is not None:
        other.write_text(text)
    assert main(["diff", file("a.json", row()), str(other)]) == 2
    written = capsys.readouterr().err
    assert message in written
    assert "other.json" in written


def test_wrong_arguments_are_refused(file, capsys):
    base = file("a.json", row())
    other = file("b.json", row(model="vgg19"))
    for arguments, message in (
        ([base], "gradwire diff BASE.json TEST.json"),
        ([base, base, base], "unexpected argument"),
        ([base, other], "have no model, batch size and number of ranks in common"),
        ([base, base, "--fail-over", "-1"], "fail_over is a number of percent, at least 0, got -1"),
        ([base, base, "--html", "/nowhere/x.html"], "html: there is no folder /nowhere"),
        ([base, base, "--html", "."], "html: . is a folder; name a file"),
    ):
        assert main(["diff", *arguments]) == 2
        assert message in capsys.readouterr().err
