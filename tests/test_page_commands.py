"""Cheap commands of pages, which run in the order of their page, in a folder of their own.

tests/test_docs.py checks that all `gradwire` commands are accepted, with their options.
"""

import re
import shlex

import pytest

from gradwire.experiments.cli import main

from .test_docs import PAGES, shell

HERE = r"gradwire (info|plan|compressors|ready --model mlp --steps 2$)"
BY_SWEEPS = [page for page in PAGES if page.endswith("/README.md") and "\nThe study:\n" in PAGES[page]]


def figures(text):
    """The words and numbers of a table, without its frame."""
    return re.findall(r"[\w.,:=+%-]+", text)


CHEAP = [page for page in PAGES if page not in BY_SWEEPS and any(re.match(HERE, line) for line, _ in shell(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", CHEAP)
def test_the_cheap_commands_of_a_page_run_in_order_and_print_what_is_shown(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for line, shown in shell(page):
        if re.match(HERE, line):
            assert main(shlex.split(line)[1:]) == 0, line
            printed = capsys.readouterr().out
            assert not shown.strip() or figures(printed) == figures(shown)
