"""The plug-in of docs/writing-a-compressor.md, as a package would bring it."""

import re

import pytest

from .forked import Script
from .test_docs import PAGES, blocks
from .test_first_minutes import printed_commands

PAGE = "docs/writing-a-compressor.md"


def block(language):
    """The text of the page's first block of a language."""
    return next(each.text for each in blocks(PAGE) if each.language == language)


@pytest.fixture
def installed(tmp_path):
    """A folder on the path with the page's package, and the metadata that an installation makes of its pyproject.toml."""
    project = block("toml")
    (entry,) = re.findall(r"^([\w-]+) = \"(my_package\.\w+:\w+)\"$", project, re.MULTILINE)
    (group,) = re.findall(r"^\[project\.entry-points\.\"([\w.]+)\"\]$", project, re.MULTILINE)
    package, metadata = tmp_path / "my_package", tmp_path / "my_package-0.1.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").touch()
    (package / f"{entry[1].split('.')[1].split(':')[0]}.py").write_text(block("python"), "utf-8")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{' = '.join(entry)}\n")
    return tmp_path


def test_a_plug_in_needs_its_entry_point_alone(installed):
    (command,) = printed_commands(PAGE, "python -c")
    code = re.search(r"python -c '(.*)'", command)[1] + "; print('eight-bits' in gradwire.compressors())"
    done = Script(f"import sys; sys.path.insert(0, {str(installed)!r}); {code}").end()
    assert done.code == 0, done.errors
    assert re.search(r"EightBits\(block=64\).*\nTrue\n", done.out)
    assert "eight-bits" in PAGES[PAGE]
