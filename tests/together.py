"""Tests that one worker of pytest-xdist gets together: those of a file, or of a folder whose tests import a lot."""

from xdist.scheduler import LoadFileScheduling

FOLDERS = ("tests/hooks/frameworks/",)  # each rank of each worker would import all frameworks


class ByFileOrFolder(LoadFileScheduling):
    """Gives each worker the tests of a file, or of one of these folders."""

    def _split_scope(self, nodeid):
        return next((folder for folder in FOLDERS if nodeid.startswith(folder)), super()._split_scope(nodeid))
