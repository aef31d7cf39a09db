"""Prints the version of the tree; with a tag such as v0.1.0, fails unless the tree may be released under it.

It may where tag, version and changelog agree, and where the publisher has replaced all placeholders: .github/PUBLISHER.md.

python .ci/version.py [TAG]
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "PUBLISHER:"
MAY_HAVE_PLACEHOLDERS = ("pyproject.toml", "CITATION.cff", "REUSE.toml", ".github/CODEOWNERS")


def version() -> str:
    """Of pyproject.toml."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert found is not None, "pyproject.toml has no version"
    return found[1]


def unfilled() -> list[str]:
    """The files that still have placeholders."""
    return [name for name in MAY_HAVE_PLACEHOLDERS if PLACEHOLDER in (ROOT / name).read_text("utf-8")]


def problems(tag: str) -> list[str]:
    """Why the tree is not to be released under a tag."""
    changes = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    wrong = [] if tag == f"v{version()}" else [f"the tag is {tag}, pyproject.toml says {version()}"]
    wrong += [] if version() in changes else [f"CHANGELOG.md has no heading [{version()}]"]
    return wrong + [f"{name} has placeholders, see .github/PUBLISHER.md" for name in unfilled()]


if __name__ == "__main__":
    if sys.argv[1:] and (found := problems(sys.argv[1])):
        raise SystemExit("; ".join(found))
    print(version())
