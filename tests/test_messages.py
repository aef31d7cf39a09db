"""Errors, warnings, log lines and help texts keep the rules of plain English: the glossary's words, and short sentences.

`python -m tests.test_messages compress/file.py ...` prints what the texts of these files break.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

from .test_words import LONGEST, of_words, sentences, words

ROOT = Path(__file__).parents[1]
FOLDERS = ["compress", "ddp_core", "experiments", "gradwire", "hooks", "kernels"]
FEW = 3  # words: a shorter text is a name or a label
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
CODE = re.compile(r"^\s*(?:<|[#.@]?[\w-]+ *\{|import |from |function |const )", re.MULTILINE)  # pages and scripts
VALUE = "code"  # stands for a value
GIVEN = re.compile(r"%[-.\d]*[a-z]|(?<!\w)--?[a-z][\w-]*")  # a value of a log line, or an option
HEADLESS = re.compile(r"\bwhat\b", re.IGNORECASE)  # a clause in place of a noun


def written(node):
    """The text of an expression with "code" for values, and the parts that it is made of; None if it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value, [node]
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else VALUE for part in node.values]
        return "".join(parts), [node, *(part for part in node.values if isinstance(part, ast.Constant))]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = written(node.left), written(node.right)
        if left or right:
            (a, of_a), (b, of_b) = left or (VALUE, []), right or (VALUE, [])
            return a + b, [node, *of_a, *of_b]
    return None


def texts(source):
    """(line, text) of all texts of a source that people read: all but docstrings, names and code of other languages."""
    tree = ast.parse(source)
    known = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)
    }
    for node in ast.walk(tree):  # an expression comes before its parts
        if id(node) in known or (found := written(node)) is None:
            continue
        text, parts = GIVEN.sub(VALUE, found[0]), found[1]
        known |= set(map(id, parts))
        if len(words(text)) >= FEW and not CODE.search(text):
            yield node.lineno, text


def broken(text):
    """The rules that a text breaks. A text alone need not say what local steps are, as a page must."""
    yield from (rule for rule in of_words(text) if "local steps without" not in rule)
    yield from (f"no noun: {text}" for each in sentences(text) if HEADLESS.search(each) and not each.endswith("?"))
    yield from (f"{len(words(each))} words: {each}" for each in sentences(text) if len(words(each)) > LONGEST)


def all_broken(file):
    """A line for each broken rule of a file."""
    return [f"{line}: {rule}" for line, text in texts(file.read_text("utf-8")) for rule in broken(text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_texts_that_people_read_are_in_plain_english(folder):
    found = {file.relative_to(ROOT).as_posix(): all_broken(file) for file in sorted((ROOT / folder).rglob("*.py"))}
    assert {file: rules for file, rules in found.items() if rules} == {}


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('raise ValueError(f"this method of {name} is not known here")', "say compressor"),
        ('warnings.warn("the rank " + name + " holds back too much of it")', "say residual"),
        ('logger.info("%s tells the others of %d", name, count)', "say shows"),
        ('ADVICE = (\n    "one two three four five "\n    "and a dense start of it"\n)', "say uncompressed"),
        ('class Config:\n    steps: int = 1\n    """the steps that a worker makes here"""', "say host"),
        (f'raise ValueError("{"word " * 31}")', "31 words"),
        ('raise RuntimeError(f"rank {rank} has ended, see what it raised")', "no noun"),
        ("print(f\"{'all that the wire has carried so far' if so else 1}\")", "say network"),
    ],
)
def test_a_broken_rule_is_found(source, rule):
    assert any(rule in each for _, text in texts(source) for each in broken(text))


def test_docstrings_names_and_values_are_left_alone():
    assert not list(texts('"""All that the wire has carried so far."""\nWIRE = "the wire"\nf"{all_the_methods_of_it}"'))
    assert not [rule for _, text in texts('f"{method} is no `wire` of all that it has"') for rule in broken(text)]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        for each in all_broken(path):
            print(f"{path}:{each}")
