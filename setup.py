"""Maps the top-level folders into one import package, `gradwire`; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

LAYERS = ("kernels", "compress", "ddp_core", "hooks", "experiments")


def packages() -> dict[str, str]:
    """{import name: folder} of every folder with an `__init__.py`; setuptools wants paths relative to this file."""
    root = Path(__file__).parent
    folders = [
        init.parent.relative_to(root) for layer in LAYERS for init in sorted((root / layer).rglob("__init__.py"))
    ]
    return {"gradwire": "gradwire", **{".".join(("gradwire", *folder.parts)): folder.as_posix() for folder in folders}}


setup(
    packages=list(packages()),
    package_dir=packages(),
    package_data={"gradwire": ["py.typed"], "gradwire.experiments": ["configs/*.yaml", "templates/*"]},
)
