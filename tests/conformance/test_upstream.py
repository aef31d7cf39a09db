"""torch's own tests do on both classes what docs/conformance.md says, row by row."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
DEVICES = {"As torch ships them": "cpu", "Written for GPUs": "moved"}  # sections of the page
ROW = re.compile(r"\| `(\w+)` \| (\w+) \| (\w+)\b.*\|")
BOTH = re.compile(r"([Tt]est\w+)(?: \(\d+ cases\))?")  # a line of the list of cases that pass on both classes


def cases():
    """(kind of class, device, case, what the page says of it), those that need the same process one after the other."""
    section, found = None, []
    for line in PAGE.read_text().splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if section in DEVICES and (row := ROW.fullmatch(line) or BOTH.fullmatch(line)):
            case, *outcomes = row.groups() if row.re is ROW else (row[1], "passes", "passes")
            found += [
                (kind, DEVICES[section], case, outcome)
                for kind, outcome in zip(("torch", "gradwire"), outcomes, strict=True)
            ]
    return sorted(found, key=lambda each: each[:2])


@pytest.mark.conformance
@pytest.mark.timeout(500)  # a case has its own limit, of 300 seconds or more
@pytest.mark.parametrize(
    ("kind", "device", "case", "outcome"),
    [pytest.param(*each, marks=pytest.mark.thorough) if each[0] == "torch" else each for each in cases()],
)
def test_a_case_does_what_the_page_says(outcome_of, kind, device, case, outcome):
    found, detail = outcome_of(case, kind, device)
    assert found == outcome, detail
