"""The documentation: its Python runs, its commands are accepted, and what it shows is what is printed.

A page's ```python blocks run as one script. A ```text block right behind one shows all that the block prints. Commands
stand behind "$ " in ```console blocks, or alone in blocks of no language (tests/test_page_commands.py runs some of them). In
the headings of troubleshooting.md, "…" stands for a value in the program's message.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

import pytest

from gradwire.ddp_core.memory import checkpoint
from gradwire.experiments.cli import COMMANDS, main
from gradwire.experiments.cli.parsing import configuration
from gradwire.hooks.fsdp import state
from gradwire.hooks.local_sgd import saved
from gradwire.hooks.report_loss import COMPRESSOR

from .torch_versions import backends_in_python

ROOT = Path(__file__).parents[1]
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in sorted(ROOT.glob("docs/**/*.md"))}
PAGES["README.md"] = (ROOT / "README.md").read_text("utf-8")
SOURCES = [
    file for folder in ("compress", "ddp_core", "hooks", "experiments") for file in ROOT.glob(f"{folder}/**/*.py")
]
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
END_OF_BLOCK = "--- end of block ---"
RECORDS = ("code", "out", "err")
RUNNER = f"""
import atexit, os, runpy, sys, threading, traceback
import gradwire, torch._dynamo
folders = dict()
for folder in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        for descriptor, name in ((1, "{RECORDS[1]}"), (2, "{RECORDS[2]}")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), descriptor)
        code = 1
        try:
            runpy.run_path("page.py", run_name="__main__")
            code = 0
        except Exception:
            traceback.print_exc()
        threading._shutdown()  # Python's end, but for the modules', which takes two seconds of each fork
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    folders[child] = folder
for folder in sys.argv[1:]:
    child, status = os.wait()
    open(os.path.join(folders[child], "{RECORDS[0]}"), "w").write(str(os.waitstatus_to_exitcode(status)))
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and where in the page it begins and ends."""

    language: str
    text: str
    start: int
    end: int


def blocks(page):
    return [Block(m["language"], m["text"], m.start(), m.end()) for m in FENCE.finditer(PAGES[page])]


def shown_below(page, block, following):
    """The text of the block that follows one, where it shows what that prints; else None."""
    shows = following and following.language == "text" and not PAGES[page][block.end : following.start].strip()
    return following.text if shows else None


def python_blocks(page):
    """Each Python block, and the output shown behind it (None where none is)."""
    found = blocks(page)
    for block, following in zip_longest(found, found[1:]):
        if block.language == "python":
            yield block, shown_below(page, block, following)


def script(page):
    """The page's Python blocks at the lines where they stand in the page."""
    lines = ["" for _ in PAGES[page].splitlines()]
    for block, _ in python_blocks(page):
        first = PAGES[page].count("\n", 0, block.start) + 1
        text = [*block.text.splitlines(), f"print({END_OF_BLOCK!r})"]
        lines[first : first + len(text)] = text
    return "\n".join(lines)


def shell(page):
    """(a command as it is printed, what is shown below it) of a page's blocks, in order."""
    found = blocks(page)
    for block, following in zip_longest(found, found[1:]):
        text = block.text.replace("\\\n", " ")
        if block.language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                line, _, shown = part.partition("\n")
                shown = shown or shown_below(page, block, following) or ""
                yield from ((each.strip(), shown) for each in line.split("; "))
        elif block.language in ("", "sh"):
            yield from ((line.partition("  #")[0].strip(), "") for line in text.splitlines())


def commands():
    """The words of each command, of fenced blocks and of `gradwire ...` in the text."""
    for page, text in PAGES.items():
        yield from (shlex.split(line) for line, _ in shell(page))
        yield from (span.split() for span in re.findall(r"`(gradwire [^`]+)`", FENCE.sub("", text)))


GRADWIRE = [words[words.index("gradwire") + 1 :] for words in commands() if "gradwire" in words]
ELSEWHERE = ["README.md", "docs/two-hosts.md"]  # in test_first_minutes.py
WITH_PYTHON = [page for page in PAGES if any(python_blocks(page)) and page not in ELSEWHERE]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """{page: (exit code, standard output, standard error)}. torch is imported once; each page has a process of its own."""
    folders = {page: tmp_path_factory.mktemp("page") for page in WITH_PYTHON}
    for page, folder in folders.items():
        (folder / "page.py").write_text(script(page), "utf-8")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    subprocess.run([sys.executable, "-c", RUNNER, *folders.values()], env=environment, check=True)
    return {page: [(folder / name).read_text("utf-8") for name in RECORDS] for page, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.timeout(400)  # the first one runs all pages
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs_and_prints_what_is_shown(page, ran):
    code, printed, errors = ran[page]
    assert code == "0", errors
    outputs = printed.split(END_OF_BLOCK + "\n")[:-1]
    expected = [shown for _, shown in python_blocks(page)]
    assert len(outputs) == len(expected)
    for output, shown in zip(outputs, expected, strict=True):
        if shown is not None:
            assert output == shown


def telling(commands):
    """Those that have an option, or a value of one, that no longer one has: dozens of runs differ in their seeds."""
    seen = set()
    for words in sorted(commands, key=lambda words: (-len(words), words)):
        shown = {word if "=" in word else (before, word) for before, word in pairwise(words)}
        if not shown or not shown <= seen:
            yield words
        seen |= shown


def refusal(arguments):
    """What a command says against its arguments; empty where it accepts them."""
    name, *options = map(os.path.expanduser, arguments)
    try:
        if name.startswith("--") or "--help" in options:
            main([name, *options])
        else:
            configuration(COMMANDS[name], f"gradwire {name}", options)
    except (SystemExit, ValueError) as error:
        return str(error).removeprefix("0")  # the exit code of help
    return ""


@pytest.mark.parametrize("name", sorted({words[0] for words in GRADWIRE}))
def test_commands_in_the_documentation_are_accepted(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "mine.py").touch()
    shown = sorted({tuple(words) for words in GRADWIRE if words[0] == name})
    if backends_in_python.args[0]:  # a torch that is too old for the backend
        shown = [words for words in shown if "gradwire" not in words]
    assert {words: told for words in telling(shown) if (told := refusal(words))} == {}


def messages():
    """Every text in the source, with … for what is filled in."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_error_messages_are_those_of_the_program():
    quoted = re.findall(r"^#+ `(.+)`$", PAGES["docs/troubleshooting.md"], re.MULTILINE)
    texts = list(messages())
    assert quoted
    for message in quoted:
        pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
        assert any(pattern.search(text) for text in texts), message


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#]+)", PAGES[page])
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not missing


def anchors(text):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    words_alone = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words_alone}


@pytest.mark.parametrize("page", PAGES)
def test_links_to_a_heading_lead_to_one_that_is_there(page):
    links = [link.partition("#") for link in re.findall(r"\]\((?!https?://|mailto:)([^)]*#[^)]+)\)", PAGES[page])]
    targets = [((ROOT / page).parent / file if file else ROOT / page, anchor) for file, _, anchor in links]
    pages = {file for file, _ in targets if file.suffix == ".md"}
    known = {file: anchors(file.read_text("utf-8")) for file in pages}
    assert [(file, anchor) for file, anchor in targets if file in known and anchor not in known[file]] == []


def test_the_files_that_contributing_names_are_there():
    named = re.findall(
        r"`((?:compress|kernels|ddp_core|hooks|experiments|tests)/[\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert len(named) > 50
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_scripts_and_commands_of_pages_name_the_variable_that_gradwire_try_sets():
    read = re.compile(r"environ(?:\.get\(|\[)[\"'](\w*COMPRESSOR)\b|\b(\w*COMPRESSOR)=\w|name: (\w*COMPRESSOR)\b")
    named = {page: {name for each in read.findall(text) for name in each if name} for page, text in PAGES.items()}
    readers = {page: names for page, names in named.items() if names}
    assert {"docs/two-hosts.md", "docs/training-script.md", "docs/launchers.md", "docs/compare.md"} <= set(readers)
    assert all(names == {COMPRESSOR} for names in readers.values()), readers


def test_the_formats_of_saved_states_are_those_that_are_written():
    numbers = re.findall(r"^\| .*\| `gradwire(?:_local_steps)?` (\d+)", PAGES["docs/concepts.md"], re.MULTILINE)
    assert list(map(int, numbers)) == [checkpoint.FORMAT, checkpoint.FORMAT, state.FORMAT, saved.FORMAT]
