"""docs/compressors.md and baselines.md: every compressor with every option, its default, and bytes and state."""

import re

import pytest

from gradwire.compress.protocol.registry import BASELINES, OF_ALL, OF_FEEDBACK, find, registered

from .test_docs import PAGES

PAGE, BASELINES_PAGE = PAGES["docs/compressors.md"], PAGES["docs/baselines.md"]
OURS = {name: each for name, each in registered.items() if each.factory.__module__.startswith("gradwire.")}
LISTED = {name: each for name, each in OURS.items() if name not in BASELINES}
OWN = LISTED | {name: find(name) for name in BASELINES}
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def sections(page=PAGE):
    """{heading: text} of a page."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def section_of(name):
    """The only section with a compressor in its heading."""
    page = BASELINES_PAGE if name in BASELINES else PAGE
    (text,) = [text for heading, text in sections(page).items() if name in heading.split(", ")]
    return text


def default_of(cell, name):
    """The default of a cell such as "1; 0.7 for `onebit`, `randomk`" for one compressor."""
    general, *others = cell.strip().split("; ")
    for other in others:
        value, _, names = other.partition(" for ")
        if f"`{name}`" in names.split(", "):
            return value
    return general


def rows(text, name):
    """{option: default} of the tables of options, for one compressor."""
    tables = re.findall(r"^\| option \| default \| meaning \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    found = ROW.findall("".join(tables))
    kept = (row for row in found if not row[2].startswith("only for") or f"`{name}`" in row[2])
    return {option: default_of(default, name) for option, default, _ in kept}


def same(told, default):
    """Whether a cell has a default; numbers are compared as numbers."""
    if isinstance(default, bool) or default is None:
        return told == str(default).lower()
    return told == default if isinstance(default, str) else float(told) == float(default)


@pytest.mark.parametrize("name", OWN)
def test_a_section_has_every_option_of_a_compressor_with_its_default(name):
    options = OWN[name].options
    common = rows(sections()["Options of all lossy compressors"], name) if OWN[name].lossy else {}
    common |= rows(sections()["Options of all compressors"], name) if name != "none" else {}
    common |= rows(sections(BASELINES_PAGE)["Options"], name) if name in BASELINES else {}
    told = {**common, **rows(section_of(name), name)}
    assert told.keys() == options.keys()
    assert [option for option, (_, default) in options.items() if not same(told[option], default)] == []


def test_the_common_tables_have_the_options_of_the_registry_only():
    assert rows(sections()["Options of all compressors"], "").keys() == OF_ALL.keys()
    assert rows(sections()["Options of all lossy compressors"], "").keys() == OF_FEEDBACK.keys()
