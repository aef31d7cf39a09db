"""A change of one line that breaks gradwire, and the tests that must fail where it is made."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """`line` of `file`, without its indentation, becomes `changed`; then one of `tests` fails."""

    what: str
    file: str
    line: str
    changed: str
    tests: str

    def made_in(self, root):
        """The text of the file before, and after. Raises ValueError unless the line is there once."""
        text = (root / self.file).read_text("utf-8")
        lines = text.splitlines(keepends=True)
        places = [place for place, line in enumerate(lines) if line.strip() == self.line]
        if len(places) != 1:
            raise ValueError(
                f"{self.file} has the line {self.line!r} {len(places)} times, not once: correct {self.what!r}"
            )
        lines[places[0]] = lines[places[0]].replace(self.line, self.changed)
        return text, "".join(lines)
