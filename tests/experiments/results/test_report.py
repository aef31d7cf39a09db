"""The page of a comparison: its structure, and how it looks in a browser where there is one."""

import dataclasses
import json
from html import unescape
from html.parser import HTMLParser

import pytest

from gradwire.experiments.results.report import write_report

from ...browser import browse, needs_browser
from ..given import results_of, run_of

VOID = {"meta", "img", "link", "br", "input"}
BYTES = (1234.5e6, 0.5e3, 12e6, 90.0)


class Page(HTMLParser):
    """Whether tags are closed, the cells of each row of each table, identities and links."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.ids, self.links = [], [], [], []
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
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def page(tmp_path):
    """The page of a comparison on two networks."""
    runs = [
        dataclasses.replace(run_of(f"topk:ratio=0.{place}", sent=sent), network=network)
        for network in ("slow", "fast")
        for place, sent in enumerate(BYTES, 1)
    ]
    (path,) = write_report(results_of(*runs), [], tmp_path / "page.html")
    return path


def test_the_page_has_a_section_and_a_full_table_for_each_network(page):
    found = Page(page.read_text())
    assert not found.open
    assert [len(table) for table in found.tables] == [1 + len(BYTES)] * 2
    assert all(len(set(table)) == 1 for table in found.tables)
    assert found.links == [f"#{name}" for name in found.ids] == ["#section-1", "#section-2"]


SORTED = """
<script>
const [table] = document.querySelectorAll("table");
const sent = [...table.rows[0].cells].findIndex((each) => each.textContent === "sent per step");
table.rows[0].cells[sent].querySelector("button").click();
const order = [...table.tBodies[0].rows].map((each) => each.cells[sent].textContent);
document.title = JSON.stringify(order);
</script>
"""


@needs_browser
def test_in_a_browser_a_click_on_a_heading_sorts_by_bytes(page, tmp_path):
    with page.open("a") as file:
        file.write(SORTED)
    shown = browse(page.as_uri(), tmp_path, "--dump-dom")
    order = json.loads(unescape(shown.partition("<title>")[2].partition("</title>")[0]))
    assert order == ["90 bytes", "500 bytes", "12.0 MB", "1.2 GB"]
