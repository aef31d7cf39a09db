"""The documentation as a site: it builds without a warning, needs no network to be read, and its search finds pages."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .browser import browse, needs_browser

ROOT = Path(__file__).parents[1]
TOOLS = ("sphinx", "furo", "myst_parser")
FETCHED = re.compile(
    r"""<(?:link|script|img|iframe)[^>]+(?:href|src)=["'](?:https?:)?//|@import|url\(["']?(?:https?:)?//"""
)
SEARCHED = {  # words that people search for, and the pages that they must find, any of them
    "Accelerate": ["frameworks"],
    "checkpoint": ["training-script"],
    "DiLoCo": ["local-steps"],
    "elastic": ["local-steps", "launchers", "index"],
    "FSDP2": ["fsdp"],
    "GAN": ["thrown-away-gradients"],
    "GRADWIRE_KERNELS": ["environment-variables"],
    "Lightning": ["frameworks"],
    "monitoring": ["watch"],
    "multi-node": ["two-hosts", "launchers", "index"],
    "netlab": ["netlab"],
    "NVLink": ["gpus-without-nvlink"],
    "overlap": ["overlap"],
    "PowerSGD": ["compressors"],
    "residual": ["glossary"],
    "SLURM": ["launchers", "bench"],
    "straggler": ["watch", "glossary"],
    "wandb": ["watch"],
}
needs_tools = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, TOOLS)), reason="no Sphinx: pip install 'gradwire[docs]'"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out, trees = (tmp_path_factory.mktemp(name) for name in ("site", "trees"))
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", trees, ROOT / "docs", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return out


@needs_tools
@pytest.mark.thorough
def test_every_page_is_on_the_site_and_nothing_of_it_is_fetched_from_elsewhere(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    read = [path for kind in ("html", "css") for path in site.rglob(f"*.{kind}")]
    assert [path.name for path in read if FETCHED.search(path.read_text("utf-8"))] == []


@needs_tools
@pytest.mark.thorough
def test_words_that_people_search_for_find_their_pages(site):
    from snowballstemmer import stemmer  # it comes with Sphinx, whose index has stems

    text = (site / "searchindex.js").read_text("utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])

    def found(word):
        parts = stemmer("english").stemWords(re.findall(r"[^\W\d]\w*", word.lower()))
        of_parts = [{*numbers(index["terms"], part), *numbers(index["titleterms"], part)} for part in parts]
        return {index["docnames"][number] for number in set.intersection(*of_parts)}

    assert [word for word, pages in SEARCHED.items() if not found(word) & set(pages)] == []


def numbers(terms, stem):
    """The documents of a stem: a number, or a list of them."""
    found = terms.get(stem, [])
    return found if isinstance(found, list) else [found]


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
