"""Maps the top-level folders into one import package, `gradwire`, and adds its native code, where it compiles."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

LAYERS = ("kernels", "compress", "ddp_core", "hooks", "experiments")
NATIVE = {"gradwire.kernels.native._native": Path("kernels/native")}  # setuptools wants paths relative to this file
if sys.platform == "linux":
    NATIVE["gradwire.ddp_core.transport._shared"] = Path("ddp_core/transport/native")
OPTIMIZED = ("-std=c++17", "-O3", "-ffp-contract=off", "-g0", "-Wall", "-Wno-psabi", "-fvisibility=hidden")


def packages() -> dict[str, str]:
    """{import name: folder} of every folder with an `__init__.py`."""
    root = Path(__file__).parent
    folders = [
        init.parent.relative_to(root) for layer in LAYERS for init in sorted((root / layer).rglob("__init__.py"))
    ]
    return {"gradwire": "gradwire", **{".".join(("gradwire", *folder.parts)): folder.as_posix() for folder in folders}}


def extensions() -> list[Extension]:
    """What is native; `optional`, so that a machine without a compiler installs all else.

    With GRADWIRE_NATIVE=required in the environment, as for wheels, what does not compile is an error.
    """
    try:
        import pybind11
        from pybind11.setup_helpers import ParallelCompile
    except ImportError:
        print("gradwire: no pybind11, so no native kernels; the reference kernels run", file=sys.stderr)
        return []
    ParallelCompile("MAX_JOBS", max=4).install()  # several files at once, as many as the variable says
    root = Path(__file__).parent
    return [
        Extension(
            name,
            sources=sorted(path.relative_to(root).as_posix() for path in (root / folder).glob("*.cpp")),
            depends=sorted(path.relative_to(root).as_posix() for path in (root / folder).glob("*.hpp")),
            include_dirs=[pybind11.get_include()],
            extra_compile_args=[*OPTIMIZED],
            extra_link_args=["-pthread"],
            language="c++",
            optional=os.environ.get("GRADWIRE_NATIVE") != "required",
        )
        for name, folder in NATIVE.items()
    ]


setup(
    packages=list(packages()),
    package_dir=packages(),
    package_data={
        "gradwire": ["py.typed"],
        "gradwire.experiments": ["configs/*.yaml", "configs/studies/*.yaml", "templates/*"],
        "gradwire.kernels.cuda": ["*.cu", "*.cuh"],
    },
    ext_modules=extensions(),
)
