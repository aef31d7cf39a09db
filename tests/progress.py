"""How far a run of the tests is: `pytest --progress`, as `make test` calls it."""

import shutil
import time

import pytest

SECONDS = {"conformance": 1.0, "ddp_core": 0.3, "hooks": 0.4, "experiments": 0.4, "trials": 2.0, "kernels": 0.05}
OTHERS = 0.03
PERCENT = 5  # from line to line, where lines stay


def seconds_of(nodeid):
    """What a test takes, about, by its folders."""
    return max((SECONDS[name] for name in nodeid.partition("::")[0].split("/") if name in SECONDS), default=OTHERS)


def minutes(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """One line instead of a letter for every test: percent, time that is gone and that is left, and the file."""

    def __init__(self, reporter):
        self.reporter, self.lasting = reporter, not reporter.isatty
        self.began = self.shown = self.done = 0.0
        self.expected = 0.0
        reporter.showfspath = False

    def pytest_collection_finish(self, session):
        self.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.expect(ids)

    def expect(self, nodeids):
        """All workers have the same tests."""
        self.expected = sum(map(seconds_of, nodeids))
        self.began = self.began or time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        category, _, _ = yield
        return category, "", ""

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.write(f"FAILED {report.nodeid}", lasting=True)

    def pytest_runtest_logfinish(self, nodeid):
        self.done += seconds_of(nodeid)
        share = self.done / self.expected
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
