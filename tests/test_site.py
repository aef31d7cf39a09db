"""The documentation as a site: it builds without a warning, needs no network to be read, and its search finds pages."""

import importlib.util
import json
import re
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from .browser import browse, needs_browser

ROOT = Path(__file__).parents[1]
TOOLS = ("sphinx", "furo", "myst_parser")
FETCHED = re.compile(
    r"""<(?:link|script|img|iframe)[^>]+(?:href|src)=["'](?:https?:)?//|@import|url\(["']?(?:https?:)?//"""
)
SEARCHED = {  # words that people search for, and the pages with them in a title or a heading, any of which they must find
    "Accelerate": ["frameworks"],
    "checkpoint": ["training-script"],
    "DiLoCo": ["local-steps"],
    "elastic": ["local-steps"],
    "FSDP2": ["fsdp"],
    "GAN": ["thrown-away-gradients"],
    "Lightning": ["frameworks"],
    "monitoring": ["watch"],
    "multi-node": ["two-hosts"],
    "netlab": ["netlab"],
    "NVLink": ["gpus-without-nvlink"],
    "overlap": ["overlap"],
    "PowerSGD": ["compressors"],
    "residual": ["watch"],
    "SLURM": ["launchers"],
    "straggler": ["watch"],
    "wandb": ["watch"],
}
IN_TEXT = {"GRADWIRE_KERNELS": "environment-variables", "straggler": "glossary"}  # these stand in tables
WIDE, SHOWN = (1440, 800, 390), ("choosing", "index", "compressors")  # pixels, and pages with wide tables and pictures
LOOKS = f"""<body><pre id="shown"></pre><script>
const shown = [];
for (const width of {[*WIDE]}) for (const page of {[*SHOWN]}) {{
  const frame = document.createElement("iframe");
  [frame.width, frame.height, frame.src] = [width, 900, `${{page}}.html`];
  frame.onload = () => {{
    const {{documentElement: root, body}} = frame.contentDocument;
    const ground = element => frame.contentWindow.getComputedStyle(element).backgroundColor;
    body.dataset.theme = "dark";
    const width_of = element => element.closest(".table-wrapper, pre") ? 0 : element.getBoundingClientRect().right;
    const widest = Math.max(root.scrollWidth, ...[...root.querySelectorAll(".content *")].map(width_of));  // cut off or not
    const over = Math.floor(widest) - frame.contentWindow.innerWidth;
    shown.push({{page, width, over, body: ground(body), pictures: [...root.querySelectorAll(".content img")].map(ground)}});
    document.getElementById("shown").textContent = JSON.stringify(shown);
  }};
  document.body.append(frame);
}}
</script>
"""
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


@pytest.fixture
def address(site):
    """The site as a server on this host shows it: from a file, a browser reads no excerpts for the search."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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

    def found(word, terms):
        parts = stemmer("english").stemWords(re.findall(r"[^\W\d]\w*", word.lower()))
        return {index["docnames"][number] for number in set.intersection(*({*numbers(terms, part)} for part in parts))}

    assert [word for word, pages in SEARCHED.items() if not found(word, index["titleterms"]) & set(pages)] == []
    assert [word for word, page in IN_TEXT.items() if page not in found(word, index["terms"])] == []


def numbers(terms, stem):
    """The documents of a stem: a number, or a list of them."""
    found = terms.get(stem, [])
    return found if isinstance(found, list) else [found]


@needs_tools
@needs_browser
@pytest.mark.thorough
def test_a_search_in_a_browser_finds_pages_with_excerpts(address, tmp_path):
    shown = browse(f"{address}/search.html?q=orthogonalize", tmp_path, "--virtual-time-budget=9000", "--dump-dom")
    results = shown.partition('id="search-results"')[2].split("<li")[1:]
    (kernels,) = [each for each in results if re.search(r'<a href="kernels\.html[?"#]', each)]
    assert "orthogonalize" in re.search(r'class="context">(.*?)</p>', kernels, re.DOTALL)[1]


@needs_tools
@needs_browser
@pytest.mark.thorough
def test_in_a_browser_no_page_is_wider_than_the_screen_and_pictures_are_white_on_a_dark_one(address, site, tmp_path):
    (site / "looks.html").write_text(LOOKS)
    printed = browse(f"{address}/looks.html", tmp_path, "--virtual-time-budget=9000", "--dump-dom")
    shown = json.loads(re.search(r'<pre id="shown">(.*?)</pre>', printed)[1])
    assert len(shown) == len(WIDE) * len(SHOWN)
    assert [each for each in shown if each["over"] > 0] == []
    assert {each["body"] for each in shown}.isdisjoint({"rgb(255, 255, 255)", "rgba(0, 0, 0, 0)"})
    assert {ground for each in shown for ground in each["pictures"]} == {"rgb(255, 255, 255)"}
