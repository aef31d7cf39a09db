"""The reference: all that pages tell users to use is in it, with arguments, results and errors."""

import ast
import functools
import importlib
import re
import runpy
from pathlib import Path

import pytest

import gradwire
from gradwire.experiments.cli import COMMANDS

from .test_docs import PAGES, blocks
from .test_layers import LAYERS

ROOT = Path(__file__).parents[1]
DIRECTIVE = re.compile(r"^\.\. (currentmodule|auto\w+):: ([\w.]+)(\(\))?\n((?: +.*\n)*)", re.MULTILINE)
FRAMEWORKS = ("gradwire.lightning", "gradwire.transformers")


def resolved(dotted):
    """The object of a dotted name, or None where its framework is not installed."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        assert module in FRAMEWORKS
        return None
    except AttributeError:
        return importlib.import_module(dotted)


def entries():
    """(page, kind, dotted name, whether users call it, names of its members) of each entry of the reference."""
    for page in sorted(ROOT.glob("docs/api*.rst")):
        module = ""
        for kind, name, made_elsewhere, options in DIRECTIVE.findall(page.read_text("utf-8")):
            if kind == "currentmodule":
                module = name
                continue
            members = re.search(r":members: ((?:.|\n +)*)", options)
            listed = re.findall(r"\w+", members[1].partition(":inherited")[0]) if members else []
            dotted = name if kind == "automodule" else f"{module}.{name}"
            yield page.name, kind, dotted, not made_elsewhere, listed


ENTRIES = list(entries())
MODULES = {dotted if kind == "automodule" else dotted.rpartition(".")[0] for _, kind, dotted, _, _ in ENTRIES}


@functools.cache
def objects():
    """What entries are about; not at import, for frameworks take seconds."""
    return {id(resolved(dotted)) for _, kind, dotted, _, _ in ENTRIES if kind != "automodule"}


def used(source):
    """The dotted names of gradwire that a script imports or reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "gradwire":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("gradwire."))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "gradwire":
            yield f"gradwire.{node.attr}"


def missing(source):
    """The names that a script uses and the reference lacks."""
    for dotted in used(source):
        if dotted not in MODULES and id(resolved(dotted)) not in objects():
            yield dotted


def python_of(page):
    """The Python of a page: its scripts, and (as `py`) lines for a script of the reader's own."""
    return "\n".join(block.text for block in blocks(page) if block.language in ("python", "py"))


def test_all_that_users_import_is_in_the_reference():
    told = {dotted.removeprefix("gradwire.") for page, _, dotted, _, _ in ENTRIES}
    for module in FRAMEWORKS:  # read as text: the framework may not be installed
        exported = (ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8").partition("__all__ =")[2]
        assert set(ast.literal_eval(exported.strip())) - {name.rpartition(".")[2] for name in told} == set()
    assert set(gradwire.__all__) - {"__version__"} - told == set()


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)])
def test_all_that_a_page_uses_is_in_the_reference(page):
    assert list(missing(python_of(page))) == []


def test_the_page_of_the_command_line_is_what_the_parsers_say(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    written = runpy.run_path(str(ROOT / "docs" / "command_line.py"))
    text = written["PAGE"].read_text("utf-8")
    assert text == written["page"](), "run `python docs/command_line.py`"
    assert re.findall(r"^## gradwire (\w+)$", text, re.MULTILINE) == list(COMMANDS)


def test_every_variable_that_the_code_reads_is_on_the_page_of_environment_variables():
    files = [ROOT / "setup.py", *(file for layer in LAYERS for file in (ROOT / layer).rglob("*.py"))]
    read = set(re.findall(r'"(GRADWIRE_[A-Z_]+)"', "\n".join(file.read_text("utf-8") for file in files)))
    described = set(re.findall(r"^\| `(GRADWIRE_[A-Z_]+)`", PAGES["docs/environment-variables.md"], re.MULTILINE))
    assert read == described
