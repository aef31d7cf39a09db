import pytest

from gradwire.experiments.network.lab import NetlabConfig
from gradwire.experiments.network.lab.hosts import NetlabError, temporary_lab
from gradwire.experiments.ranks.launchers import LAB_VARIABLE


def why_not():
    """Why no lab can be made here; empty where one can."""
    try:
        with temporary_lab(NetlabConfig(hosts=1, rate="1mbit")):
            return ""
    except NetlabError as error:
        return str(error)


@pytest.fixture(scope="session")
def possible():
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    for name in (LAB_VARIABLE, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
