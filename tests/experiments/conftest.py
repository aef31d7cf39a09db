import multiprocessing

import pytest

from gradwire.experiments import launch

IMPORTED = ["gradwire.experiments.bench.run", "gradwire.experiments.compare", "torch._dynamo", "torchvision"]


@pytest.fixture(autouse=True, scope="module")
def quick_start():
    """The ranks of commands that run in this process are forked from one that has imported what takes seconds.

    Those of commands that tests start as processes are spawned, as users' are.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    start = launch.multiprocessing.start_processes

    def forked(*args, **kwargs):
        return start(*args, **{**kwargs, "start_method": "forkserver"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.multiprocessing, "start_processes", forked)
        yield
