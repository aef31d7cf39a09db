"""docs/benchmarks/demo_bytes.py, and the page with its table."""

import importlib
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "results" / "demo-bytes" / "README.md").read_text()


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "benchmarks")
    return importlib.import_module("demo_bytes")


@pytest.mark.parametrize(("width", "parameters", "least"), [(1024, 319_946_752, 0.937), (2048, 1_176_764_416, 3.447)])
def test_sizes_and_bytes_are_those_of_demo_s_configurations(script, width, parameters, least):
    with torch.device("meta"):
        model = script.olmo(width)
    assert sum(each.numel() for each in model.parameters()) == parameters == 16 * 16 * width**2 + 50304 * width
    assert script.demo_bytes(model, 1) == parameters / 4096 * 12 == pytest.approx(least * 1e6, abs=1000)


def test_the_table_on_the_page_is_the_script_s(script, monkeypatch):
    monkeypatch.setattr(script, "COMPRESSORS", ["none"])  # all take a minute
    for line in script.table().splitlines():
        assert f"{line}\n" in PAGE
    assert f"{2 * 1176764416 / 1e6:,.1f} MB" in PAGE
