"""Prints the notes of a release: its section of CHANGELOG.md, with links that work on the page of the release.

python .ci/notes.py TAG REPOSITORY        such as v0.1.0 https://github.com/OWNER/NAME
"""

import re
import sys
from pathlib import Path


def notes(changelog: str, tag: str, repository: str) -> str:
    """Return the section of a tag's version. The page of a release breaks lines at newlines, so wrapped lines are joined."""
    version = tag.removeprefix("v")
    found = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise SystemExit(f"CHANGELOG.md has nothing under a heading [{version}]")
    joined = re.sub(r"(?<!\n)\n *(?![-* #\n])", " ", found[1].strip())
    return re.sub(r"\]\((?!https?:)", f"]({repository}/blob/{tag}/", joined)


if __name__ == "__main__":
    print(notes((Path(__file__).parents[1] / "CHANGELOG.md").read_text("utf-8"), *sys.argv[1:]))
