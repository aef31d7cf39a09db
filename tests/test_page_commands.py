"""Cheap commands of pages, which run in the order of their page, in a folder of their own.

tests/test_docs.py checks that all `gradwire` commands are accepted, with their options.
"""

import re
import shlex
from itertools import zip_longest

import pytest

from gradwire.experiments.cli import main

from .test_docs import PAGES, blocks, shown_below

HERE = r"gradwire (info|plan|compressors|ready --model mlp --steps 2$)"
BY_SWEEPS = [page for page in PAGES if page.endswith("/README.md") and "\nThe study:\n" in PAGES[page]]


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


def figures(text):
    """The words and numbers of a table, without its frame."""
    return re.findall(r"[\w.,:=+%-]+", text)


CHEAP = [page for page in PAGES if page not in BY_SWEEPS and any(re.match(HERE, line) for line, _ in shell(page))]


@pytest.mark.parametrize("page", CHEAP)
def test_the_cheap_commands_of_a_page_run_in_order_and_print_what_is_shown(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for line, shown in shell(page):
        if re.match(HERE, line):
            assert main(shlex.split(line)[1:]) == 0, line
            printed = capsys.readouterr().out
            assert not shown.strip() or figures(printed) == figures(shown)
