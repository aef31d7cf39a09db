"""How far a run of the tests is: `pytest --progress`, as `make test` calls it."""

import shutil
import time

import pytest

SECONDS = {"conformance": 2.0, "slow": 2.0, "ranks": 0.4, "experiments": 0.4, "kernels": 0.1}
OTHERS = 0.03
PERCENT = 5  # from line to line, where lines stay


def seconds_of(item):
    """What a test takes, about, by its markers, its folders and what it asks for."""
    return max((SECONDS[name] for name in (*item.keywords, *item.fixturenames) if name in SECONDS), default=OTHERS)


def minutes(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """One line instead of a letter for every test: percent, time that is gone and that is left, and the file."""

    def __init__(self, reporter):
        self.reporter, self.lasting = reporter, not reporter.isatty
        self.began = self.shown = self.done = 0.0
        self.expected = {}
        reporter.showfspath = False

    def pytest_collection_finish(self, session):
        self.expected = {item.nodeid: seconds_of(item) for item in session.items}
        self.began = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        category, _, _ = yield
        return category, "", ""

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.write(f"FAILED {report.nodeid}", lasting=True)

    def pytest_runtest_logfinish(self, nodeid):
        self.done += self.expected[nodeid]
        share = self.done / sum(self.expected.values())
        if not self.lasting or 100 * share >= self.shown + PERCENT or share > 1 - 1e-9:
            self.shown = 100 * share
            gone = time.monotonic() - self.began
            left = gone * (1 / share - 1)
            text = (
                f"{100 * share:3.0f} %  {minutes(gone)} gone, about {minutes(left)} left  {nodeid.partition('::')[0]}"
            )
            self.write(text, lasting=self.lasting)

    def write(self, text, lasting):
        width = shutil.get_terminal_size().columns - 1
        line = text if self.lasting else "\r" + text[:width].ljust(width)
        self.reporter.write(f"{line}\n" if lasting else line, flush=True)
