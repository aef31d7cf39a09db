"""The reference: all that pages tell users to use is in it, with arguments, results and errors."""

import ast
import functools
import importlib
import inspect
import re
import runpy
import textwrap
from dataclasses import fields
from pathlib import Path
from types import FunctionType

import pytest

import gradwire
from gradwire.experiments.cli import COMMANDS

from .test_docs import PAGES, blocks
from .test_layers import LAYERS

ROOT = Path(__file__).parents[1]
DIRECTIVE = re.compile(r"^\.\. (currentmodule|auto\w+):: ([\w.]+)(\(\))?\n((?: +.*\n)*)", re.MULTILINE)
OPTIONS = (
    "gradwire.compress.algorithms",
    "gradwire.compress.feedback",
    "gradwire.compress.composed",
)  # on another page
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
CALLED = {
    f"{dotted}.{member}" if member else dotted: (dotted, member)
    for _, kind, dotted, called, members in ENTRIES
    if kind in ("autofunction", "autoclass")
    for member in [*([""] if called else []), *members]
}


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


def sections(text):
    """{heading: names} of the sections of a docstring that list names."""
    found = {}
    for heading, body in re.findall(r"^(\w+):\n((?:    .*\n?|\n(?=    ))+)", text, re.MULTILINE):
        found[heading] = re.findall(r"^    ([\w.]+): ", body, re.MULTILINE)
    return found


def parameters(callee):
    """The arguments that a docstring describes: not `self`, and of a catch-all only the named one."""
    try:
        signature = inspect.signature(callee)
    except ValueError:
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name for name, each in signature.parameters.items() if name not in ("self", "cls") and each.kind not in kinds
    ]


def code_of(callee):
    """The function behind a property or a class; a function itself."""
    if isinstance(callee, type):
        return vars(callee).get("__init__")
    return callee.fget if isinstance(callee, property) else callee


def untyped(function):
    """The arguments without a type, and `return`, of a function written in Python."""
    names = [*parameters(function), "return"] if isinstance(function, FunctionType) else []
    return [name for name in names if name not in inspect.unwrap(function).__annotations__]


def attributes(kind):
    """The fields of a dataclass itself, or of a named tuple."""
    if isinstance(kind, type) and "__dataclass_fields__" in vars(kind):  # a subclass may take other arguments
        return [each.name for each in fields(kind) if each.init and not each.name.startswith("_")]
    return getattr(kind, "_fields", ())


def raised(function):
    """The kinds of errors that a function's own code raises."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError):  # it has no source
        return set()
    errors = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call))
    return {ast.unparse(error.func) for error in errors}


def gaps(callee):
    """What the docstring of a function, class or property leaves out, and the types that are missing."""
    text = inspect.getdoc(callee) or ""
    described = sections(text)
    if not text:
        yield "no docstring"
    if names := attributes(callee):
        known = described.get("Attributes", [])
        yield from (f"no attribute {name}" for name in names if f"`{name}`" not in text and name not in known)
        return
    yield from (f"no type of {name}" for name in untyped(code_of(callee)))
    told = described.get("Raises", re.findall(r"Raises (\w+)", text) if isinstance(callee, property) else [])
    yield from (f"no {error}" for error in raised(code_of(callee)) if error not in told)
    if isinstance(callee, property) or not callable(callee):
        return
    yield from (f"no argument {name}" for name in parameters(callee) if name not in described.get("Args", []))
    yield from (
        f"no argument {name}" for name in described.get("Args", []) if name not in str(inspect.signature(callee))
    )
    if isinstance(callee, FunctionType):
        result = callee.__annotations__.get("return") not in (None, "None", "Iterator[None]")
        short = re.match("Return ", text) and not parameters(callee)
        if result and not short and not re.search(r"^(Returns|Yields):", text, re.MULTILINE):
            yield "no result"


def test_all_that_users_import_is_in_the_reference():
    told = {dotted.removeprefix("gradwire.") for page, _, dotted, _, _ in ENTRIES}
    for module in FRAMEWORKS:  # read as text: the framework may not be installed
        exported = (ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8").partition("__all__ =")[2]
        assert set(ast.literal_eval(exported.strip())) - {name.rpartition(".")[2] for name in told} == set()
    assert set(gradwire.__all__) - {"__version__"} - told == set()


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)])
def test_all_that_a_page_uses_is_in_the_reference(page):
    assert list(missing(python_of(page))) == []


@pytest.mark.parametrize("name", CALLED)
def test_the_reference_says_what_goes_in_what_comes_out_and_what_is_raised(name):
    dotted, member = CALLED[name]
    found = resolved(dotted)
    if found is None:
        pytest.skip(f"the framework of {dotted} is not installed")
    if member:
        found = inspect.getattr_static(found, member)
        found = getattr(found, "__func__", found)
    if isinstance(found, type) and found.__module__.startswith(OPTIONS):
        return
    assert list(gaps(found)) == []


def test_a_gap_is_found():
    def half(first, second: int) -> int:
        """Add.

        Args:
            first: a number.
        """
        if second:
            raise ValueError("no")
        return first

    assert list(gaps(half)) == ["no type of first", "no ValueError", "no argument second", "no result"]
    assert list(missing("from gradwire.compress import most_rounds\nimport gradwire\ngradwire.attach")) == [
        "gradwire.compress.most_rounds"
    ]


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
