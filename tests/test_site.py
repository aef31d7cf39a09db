"""The documentation as a site: it builds without a warning, needs no network to be read, and its search finds pages."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire

from .browser import browse, needs_browser

ROOT = Path(__file__).parents[1]
TOOLS = ("sphinx", "furo", "myst_parser")
FETCHED = re.compile(
    r"""<(?:link|script|img|iframe)[^>]+(?:href|src)=["'](?:https?:)?//|@import|url\(["']?(?:https?:)?//"""
)
needs_tools = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, TOOLS)), reason="no Sphinx: pip install 'gradwire[docs]'"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out, trees = (tmp_path_factory.mktemp(name) for name in ("site", "trees"))
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", trees, ROOT / "docs", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return out


def test_all_that_users_import_is_in_the_reference():
    text = (ROOT / "docs" / "api.rst").read_text("utf-8")
    told = re.findall(r"^\.\. auto\w+:: (?:gradwire\.)?(\w+)$", text, re.MULTILINE)
    assert sorted(told) == sorted(set(gradwire.__all__) - {"__version__"})


@needs_tools
@pytest.mark.thorough
def test_every_page_is_on_the_site_and_nothing_of_it_is_fetched_from_elsewhere(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    read = [path for kind in ("html", "css") for path in site.rglob(f"*.{kind}")]
    assert [path.name for path in read if FETCHED.search(path.read_text("utf-8"))] == []


@needs_tools
@needs_browser
@pytest.mark.thorough
def test_in_a_browser_pages_are_shown_and_searched(site, tmp_path):
    picture = tmp_path / "page.png"
    browse((site / "index.html").as_uri(), tmp_path, f"--screenshot={picture}")
    assert picture.stat().st_size > 50_000  # an empty page is smaller
    found = browse(
        (site / "search.html").as_uri() + "?q=orthogonalize", tmp_path, "--virtual-time-budget=9000", "--dump-dom"
    )
    assert re.search(
        r'<a href="kernels.html\?highlight|<a href="kernels.html', found.partition('id="search-results"')[2]
    )
