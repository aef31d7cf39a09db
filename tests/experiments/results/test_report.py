"""The page of a comparison: its structure, and how it looks in a browser where there is one."""

import dataclasses
import json
from html import unescape

import pytest

from gradwire.experiments.results.report import write_report

from ...browser import browse, needs_browser
from ..given import results_of, run_of

BYTES = (1234.5e6, 0.5e3, 12e6, 90.0)


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
