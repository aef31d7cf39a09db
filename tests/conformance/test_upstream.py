"""torch's own tests do on both classes what docs/conformance.md says, row by row."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = dict(os.environ)  # before other test modules, and the packages that they import, add to it
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


class Runner:
    """A process in which cases run one after the other; what they print is kept out of sight."""

    def __init__(self, kind, device, **more):
        choice = {"GRADWIRE_CONFORMANCE": kind, "GRADWIRE_CONFORMANCE_DEVICE": device, "WORLD_SIZE": "2"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.runner"],
            cwd=ROOT,
            env={**ENVIRONMENT, **choice, **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, case):
        print(case, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that runs {case} died with exit code {self._process.wait(10)}"
        return json.loads(answer)

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


@pytest.fixture(scope="module")
def runners():
    started = {}
    yield started
    for runner in started.values():
        runner.close()


@pytest.mark.conformance
@pytest.mark.timeout(500)  # a case has its own limit, of 300 seconds or more
@pytest.mark.parametrize(
    ("kind", "device", "case", "outcome"),
    [pytest.param(*each, marks=pytest.mark.thorough) if each[0] == "torch" else each for each in cases()],
)
def test_a_case_does_what_the_page_says(runners, kind, device, case, outcome):
    if (kind, device) not in runners:
        runners[kind, device] = Runner(kind, device)
    answer = runners[kind, device].run(case)
    if answer["outcome"] == "missing":
        pytest.skip(answer["detail"])
    assert answer["outcome"] == outcome, answer["detail"]


@pytest.mark.parametrize(
    ("section", "summary"),
    [
        ("As torch ships them", "as torch ships them"),
        ("Written for GPUs", "written for GPUs, moved to the CPU"),
    ],
)
def test_the_page_counts_its_rows_right(section, summary):
    text = PAGE.read_text()
    body = text.split(f"## {section}\n")[1].split("\n## ")[0]
    several = {case: int(count) for case, count in re.findall(r"(\w+)\b.*\((\d+) cases\)", body)}
    rows = [each for each in cases() if each[1] == DEVICES[section]]
    passing = [
        sum(several.get(case, 1) for kind, _, case, outcome in rows if (kind, outcome) == (wanted, "passes"))
        for wanted in ("torch", "gradwire")
    ]
    total = sum(several.get(case, 1) for kind, _, case, _ in rows if kind == "torch")
    assert f"| {summary} | {total} | {passing[0]} | {passing[1]} |" in text
