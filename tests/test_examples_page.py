"""docs/examples.md has the tables of all finished runs, and the settings that these ran with."""

import importlib
import json

import pytest

from .test_docs import PAGES, ROOT

SCRIPT = ROOT / "docs" / "benchmarks" / "examples_tables.py"


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module(SCRIPT.stem)


def test_the_page_has_the_tables_as_computed(tables):
    page = PAGES["docs/examples.md"]
    for title in tables.TABLES:
        assert tables.table(title) in page, f"python {SCRIPT.relative_to(ROOT)} prints the tables"


def test_no_finished_run_is_left_out(tables):
    for file in tables.RUNS.glob("*.jsonl"):
        lines = file.read_text("utf-8").splitlines()
        shown = [title for title, (name, _) in tables.TABLES.items() if name == file.stem]
        counted = sum(len(by_seed) for title in shown for by_seed in tables.runs(title).values())
        assert counted == len(lines) > 0
        assert all(json.loads(line)["validation_loss"] > 0 for line in lines)
