"""One page over results of all kinds: its structure, and how it looks in a browser where there is one."""

import json
import os
import shutil
from base64 import b64encode
from html import unescape
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path

import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.report.command import ReportConfig, report_command
from gradwire.experiments.results.picture import draw

from ...browser import browse, needs_browser
from ..given import results_of, run_of

VOID = {"meta", "img", "link", "br", "input"}
ENVIRONMENT = {"processor": "a processor", "cores": 2}
VERSIONS = {"gradwire": "0.1.0", "torch": "2.15", "environment": ENVIRONMENT}


class Page(HTMLParser):
    """Whether tags are closed, and what tables, sources and identities there are."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.sources, self.ids, self.links = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append(0)
        if tag in ("td", "th"):
            self.tables[-1][-1] += 1
        self.sources += [found["src"]] if "src" in found else []
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def write(folder, name, document):
    (folder / name).write_text(json.dumps(document))


@pytest.fixture
def results(tmp_path, written):
    """A folder with results of every kind, and files that are none."""
    return Path(shutil.copytree(written, tmp_path / "results"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    for name in ("compare", "sweep", "others"):
        (folder / name).mkdir(parents=True)
    compared = results_of(run_of(), run_of("onebit", sent=130.0))
    compared.write(folder / "compare" / "results.json")
    (picture, _) = draw(compared, folder / "compare")
    shutil.copy(picture, folder / "sweep" / "speed.png")
    sweep = {
        **VERSIONS,
        "kind": "sweep",
        "date": "2026-01-01",
        "title": "A <study>",
        "source": "Figure 1.",
        "notes": "",
        "short": False,
        "labels": ["emulated link 100mbit"],
        "commands": ["gradwire bench --models=mlp"],
        "config": {"command": "bench"},
        "columns": ["compressor", "speedup"],
        "rows": [{"compressor": "none", "speedup": 1.0}, {"compressor": "onebit", "speedup": None}],
        "pictures": {"speed.png": "Speed."},
        "failures": {"elements 10": "ended with exit code 1\nmore"},
    }
    write(folder / "sweep", "study.json", sweep)
    row = {"model": "mlp", "world_size": 2, "compressor": "none", "measurements": {"sec_per_iter": {"p50": 0.5}}}
    write(folder / "others", "bench.json", {**VERSIONS, "kind": "bench", "rows": [row]})
    pieces = {"elements": 10, "pieces": 6, "seconds": {"p50": 0.1}, "labels": ["netlab: 3 hosts at 2gbit"]}
    command = "gradwire collective --netlab.hosts=3"
    document = {**VERSIONS, "kind": "collective", "command": command, "rows": [pieces]}
    write(folder / "others", "collective.json", document)
    kernels = {**VERSIONS, "kind": "kernels", "rows": [{"operation": "sign_pack", "seconds": 0.1}]}
    write(folder / "others", "kernels.json", kernels)
    write(folder / "others", "foreign.json", {"rows": []})
    (folder / "others" / "broken.json").write_text("{")
    return folder


@pytest.fixture
def page(results, tmp_path):
    assert main(["report", str(results), f"--out={tmp_path / 'page.html'}"]) == 0
    return tmp_path / "page.html"


def test_the_page_has_a_section_and_a_full_table_for_each_set_of_results(page):
    found = Page(page.read_text())
    assert not found.open
    assert [len(table) for table in found.tables] == [3, 2, 2, 2, 3]  # compare, bench, collective, kernels, sweep
    assert all(len(set(table)) == 1 for table in found.tables)
    assert found.links == [f"#{name}" for name in found.ids] == [f"#section-{index}" for index in range(1, 6)]


def test_the_page_needs_nothing_beside_it(page):
    found = Page(page.read_text())
    assert len(found.sources) == 3
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in found.sources)
    assert "http" not in page.read_text()


def test_what_users_named_is_escaped(page):
    text = page.read_text()
    assert "A &lt;study&gt;" in text
    assert "A <study>" not in text


def test_the_page_tells_failures_labels_commands_and_the_machine(page):
    text = page.read_text()
    for told in (
        "failed: elements 10: ended with exit code 1",
        "emulated link 100mbit",
        "netlab: 3 hosts at 2gbit",
        "gradwire bench --models=mlp",
        "gradwire collective --netlab.hosts=3",
        "a processor",
        "2026-01-01",
    ):
        assert told in text


def test_a_single_file_and_several_places_are_fine(results, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", str(results / "others" / "bench.json"), str(results / "compare"), f"--out={out}"]) == 0
    assert "2 sets of results" in capsys.readouterr().out
    assert len(Page(out.read_text()).tables) == 2


def test_what_cannot_be_reported_is_refused(tmp_path, capsys):
    for arguments, message in [
        ([], "name at least one folder"),
        ([str(tmp_path / "nowhere")], "is no file and no folder"),
        ([str(tmp_path)], "has no results"),
        ([str(tmp_path), "--out=/nowhere/page.html"], "out: there is no folder /nowhere"),
        ([str(tmp_path), "--out=."], "out: . is a folder; name a file"),
    ]:
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err


STRANGE = (None, "text", [7], {"a": 1}, 10**400)


def changed(document, depth=3):
    """The document with one value replaced by each strange one, or taken away, at any place down to a depth."""
    keys = document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in list(keys)[:20] if depth else ():
        copied = dict(document) if isinstance(document, dict) else list(document)
        del copied[key]
        yield copied
        for value in (*STRANGE, *changed(document[key], depth - 1)):
            copied = dict(document) if isinstance(document, dict) else list(document)
            copied[key] = value
            yield copied


def reported(file, page):
    """The file, where the page was written, or else why it was refused."""
    try:
        assert report_command(ReportConfig([str(file)], out=str(page))) == 0
    except ValueError as error:
        return str(error)
    return str(file)


@pytest.mark.parametrize(
    "name", ["compare/results", "sweep/study", "others/bench", "others/collective", "others/kernels"]
)
def test_a_malformed_file_is_shown_or_refused_with_its_name_and_never_a_traceback(name, results, tmp_path, capsys):
    document = json.loads((results / f"{name}.json").read_text())
    file = tmp_path / "one.json"
    for each in islice(changed(document, depth=2 if name == "compare/results" else 3), 0, None, 11):
        file.write_text(json.dumps(each))
        assert f"{file} " in f"{reported(file, tmp_path / 'page.html')} "
        capsys.readouterr()


def test_a_document_without_an_end_of_nesting_is_left_out(results, tmp_path):
    (results / "others" / "deep.json").write_text("[" * 100_000)
    assert main(["report", str(results), f"--out={tmp_path / 'page.html'}"]) == 0


def test_a_pipe_is_not_waited_for(results, tmp_path, capsys):
    pipe = results / "pipe.json"
    os.mkfifo(pipe)
    assert main(["report", str(results), f"--out={tmp_path / 'page.html'}"]) == 0
    assert main(["report", str(pipe), f"--out={tmp_path / 'page.html'}"]) == 2
    assert "pipe.json is no file and no folder" in capsys.readouterr().err


@pytest.mark.parametrize("secret", ["speed.png", "secret.txt"])
def test_a_file_that_is_no_picture_is_not_put_into_the_page(secret, results, tmp_path):
    study = json.loads((results / "sweep" / "study.json").read_text())
    (results / "sweep" / secret).unlink(missing_ok=True)
    (results / "sweep" / secret).write_text("a password")
    write(results / "sweep", "study.json", {**study, "pictures": {secret: "Harmless."}})
    assert main(["report", str(results / "sweep"), f"--out={tmp_path / 'page.html'}"]) == 0
    text = (tmp_path / "page.html").read_text()
    assert b64encode(b"a password").decode() not in text
    assert Page(text).sources == []


@needs_browser
def test_a_browser_shows_the_page(page, tmp_path):
    picture = tmp_path / "page.png"
    browse(page.as_uri(), tmp_path, f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000  # an empty page is smaller


SORTED = """
<script>
const [table] = document.querySelectorAll("table"), last = table.rows[0].cells.length - 1;
table.rows[0].cells[last].querySelector("button").click();
const order = [...table.tBodies[0].rows].map((each) => each.cells[last].textContent);
const fits = [...document.querySelectorAll(".wide")].every((each) => each.scrollWidth <= each.clientWidth);
document.title = JSON.stringify([order, fits]);
</script>
"""


@needs_browser
def test_in_a_browser_a_click_on_a_heading_sorts_by_number_and_tables_fit(results, tmp_path):
    study = json.loads((results / "sweep" / "study.json").read_text())
    rows = [{"compressor": "none", "speedup": value} for value in (1234.5, 0.5, None, 0.12, 1e-6)]
    write(results / "sweep", "study.json", {**study, "rows": rows})
    assert main(["report", str(results / "sweep"), f"--out={tmp_path / 'page.html'}"]) == 0
    with (tmp_path / "page.html").open("a") as page:
        page.write(SORTED)
    shown = browse((tmp_path / "page.html").as_uri(), tmp_path, "--dump-dom")
    order, fits = json.loads(unescape(shown.partition("<title>")[2].partition("</title>")[0]))
    assert order == ["1e-06", "0.12", "0.5", "1234", ""]
    assert fits
