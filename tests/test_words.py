"""Docstrings read well without the name that they describe: they begin with a verb or a noun."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [
    "compress",
    "kernels",
    "ddp_core/averaging",
    "ddp_core/buckets",
    "ddp_core/engine",
    "ddp_core/measure",
    "ddp_core/memory",
    "ddp_core/overlap",
    "ddp_core/reducer",
    "ddp_core/torch_compat",
    "ddp_core/transport",
    "hooks",
]  # those that keep the rule
REFUSED = ["Among", "As", "How", "It", "Of", "So", "That", "Those", "What", "Where", "Whether", "Which", "Who"]


def headless(source):
    """The docstrings of a module, its classes and its functions whose first word leaves out what they describe."""
    nodes = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    )
    documented = ((getattr(node, "name", "the module"), ast.get_docstring(node) or "") for node in nodes)
    return [(name, text.partition("\n")[0]) for name, text in documented if text and text.split()[0] in REFUSED]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    found = {file.relative_to(ROOT): headless(file.read_text()) for file in sorted((ROOT / folder).rglob("*.py"))}
    assert {file: each for file, each in found.items() if each} == {}


@pytest.mark.parametrize("text", ["Whether it fits.", "Of this rank.", "What is sent."])
def test_a_headless_docstring_is_found(text):
    assert headless(f'class A:\n    def f():\n        """{text}"""\n') == [("f", text)]
    assert headless(f'"""{text}"""\n') == [("the module", text)]
    assert headless('def f():\n    """Return True if it fits, as it is."""\n') == []
