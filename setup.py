"""Maps the top-level folders into one import package, `gradwire`, and adds its native code, where it compiles."""

import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LAYERS = ("kernels", "compress", "ddp_core", "hooks", "experiments")
NATIVE = {"gradwire.kernels.native._kernels": Path("kernels/native")}  # setuptools wants paths relative to this file
if sys.platform == "linux":
    NATIVE["gradwire.ddp_core.transport._shared_memory"] = Path("ddp_core/transport/native")
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")  # one build for all; without a GIL each Python has its own
OPTIMIZED = ("-std=c++17", "-O3", "-ffp-contract=off", "-g0", "-Wall", "-Wno-psabi", "-fvisibility=hidden")
HARDENED, LINKED = tuple[str, ...](), ("-pthread",)
if sys.platform == "linux" and "-fsanitize" not in os.environ.get(
    "CXXFLAGS", ""
):  # sanitizers watch the plain functions
    HARDENED = ("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3")
    LINKED += ("-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack")


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
    root = Path(__file__).parent
    headers = [
        path.relative_to(root).as_posix() for folder in NATIVE.values() for path in (root / folder).glob("*.hpp")
    ]
    return [
        Extension(
            name,
            sources=sorted(path.relative_to(root).as_posix() for path in (root / folder).glob("*.cpp")),
            depends=sorted(headers),
            define_macros=[("Py_LIMITED_API", "0x030A0000")] if LIMITED else [],
            py_limited_api=LIMITED,
            extra_compile_args=[*OPTIMIZED, *HARDENED],
            extra_link_args=[*LINKED],
            language="c++",
            optional=os.environ.get("GRADWIRE_NATIVE") != "required",
        )
        for name, folder in NATIVE.items()
    ]


class BuildInParallel(build_ext):
    """Compiles several files at once: as many as MAX_JOBS in the environment says."""

    def build_extensions(self) -> None:
        compile_all, jobs = self.compiler.compile, int(os.environ.get("MAX_JOBS", min(os.cpu_count() or 1, 4)))

        def compile_at_once(sources: list[str], *arguments: Any, **options: Any) -> list[str]:
            with ThreadPoolExecutor(jobs) as pool:
                done = pool.map(lambda source: compile_all([source], *arguments, **options), sources)
                return [file for files in done for file in files]

        self.compiler.compile = compile_at_once
        super().build_extensions()


setup(
    packages=list(packages()),
    package_dir=packages(),
    package_data={
        "gradwire": ["py.typed"],
        "gradwire.experiments": ["configs/*.yaml", "configs/studies/*.yaml", "templates/*"],
        "gradwire.kernels.cuda": ["*.cu", "*.cuh"],
    },
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildInParallel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED else {},
)
