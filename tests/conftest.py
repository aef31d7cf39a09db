import atexit
import functools
import gc
import importlib.util
import multiprocessing
import os
import random
import signal
import socket
import sys
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it where kernels are defined
    atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)  # Triton's bindings report leaks behind the last line

os.environ.pop("PYTHONWARNINGS", None)  # tests read the warnings of scripts that they start

from gradwire import kernels

from .forked import Python
from .ranks import PRELOADED, RankPool
from .variants import part_of, too_many_interpreted

BACKENDS = {each.name: each for each in kernels.backends() if each.device in ("cpu", "any")}
LONG = """
    frameworks test_triton_compile.py test_upstream.py test_trials.py test_processes.py test_studies.py test_run.py
    test_first_minutes.py test_launchers_page.py test_docs.py test_package.py test_elastic.py
"""
COMPILED = [name for name in BACKENDS if name != "triton"]
multiprocessing.set_forkserver_preload(PRELOADED)
gc.disable()  # until all tests are collected: what is made until then stays

# ignored as in the background of a shell script; processes would inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--every-variant", action="store_true", help="run all variants of tests in Triton's interpreter")
    parser.addoption(
        "--part", choices=("quick", "rest", "both"), help="what `make test` runs, what `make test-rest` runs, or both"
    )


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if not config.getoption("--every-variant", default=False):
        keep(config, items, set(items) - too_many_interpreted(items))
    if part := config.getoption("--part", default=None):
        keep(config, items, part_of(items, part))

    # a long file or folder at the end would leave other workers idle
    items.sort(key=lambda item: {item.path.name, item.path.parent.name}.isdisjoint(LONG.split()))


def keep(config, items, kept):
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getoption("dist") == "loadfile":
        from .together import ByFileOrFolder

        return ByFileOrFolder(config, log)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    gc.freeze()  # or each collection goes through all of torch
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def parsers_made_once():
    """A command's parser takes a tenth of a second to make, and hundreds of tests parse; help changes the one it shows."""
    if parsing := sys.modules.get("gradwire.experiments.cli.parsing"):
        make, for_help = parsing._parser, parsing.parser_for_help
        cached = functools.cache(make)

        def anew(command, prog):
            parsing._parser = make
            try:
                return for_help(command, prog)
            finally:
                parsing._parser = cached

        parsing._parser, parsing.parser_for_help = cached, anew


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each kernel backend for CPU tensors in turn; what it does not have runs on the reference."""
    yield from running(request.param)


@pytest.fixture(params=COMPILED)
def compiled_backend(request):
    """As `backend`, without Triton's interpreter."""
    yield from running(request.param)


def running(name):
    if not BACKENDS[name].available:
        pytest.skip(f"kernel backend {name}: {BACKENDS[name].reason}")
    with kernels.use_backend(*dict.fromkeys((name, "reference"))):
        yield name


@pytest.fixture(scope="session")
def ranks():
    pool = RankPool()
    yield pool
    assert all(code == 0 for code in pool.close())


@pytest.fixture
def group():
    """The default group, of this process alone: for what needs a group, and no other rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def forked_python(tmp_path_factory):
    """Python as a program whose processes have imported torch already."""
    return Python(tmp_path_factory.mktemp("program") / "python")


@pytest.fixture
def unused_port():
    """Below those that the system gives to whoever asks for any, as other tests do meanwhile."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are taken")
