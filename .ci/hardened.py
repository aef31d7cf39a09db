"""Checks how native code was linked and compiled: RELRO, BIND_NOW, no executable stack, stack protector.

python .ci/hardened.py FILE...        wheels and shared objects of Linux; needs readelf, of binutils
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PROTECTED = ("__stack_chk_fail", "__stack_chk_guard")  # what a function with an array on the stack calls, or reads


def missing(library: Path) -> list[str]:
    """What a shared object lacks."""
    command = ["readelf", "--wide", "--program-headers", "--dynamic", "--dyn-syms", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    stack = next((line for line in lines if "GNU_STACK" in line), "RWE")
    found = {
        "RELRO": any("GNU_RELRO" in line for line in lines),
        "BIND_NOW": any("BIND_NOW" in line or "Flags: NOW" in line for line in lines),
        "a stack that is not executable": "RWE" not in stack,
        "a stack protector": any(name in line for line in lines for name in PROTECTED),
    }
    return [name for name, there in found.items() if not there]


def libraries(path: Path, folder: Path) -> list[Path]:
    """The shared objects of a wheel, unpacked into a folder; or the one that the path is."""
    if path.suffix != ".whl":
        return [path]
    with zipfile.ZipFile(path) as wheel:
        return [Path(wheel.extract(name, folder)) for name in wheel.namelist() if name.endswith(".so")]


def main(paths: list[str]) -> None:
    """Raise SystemExit where a library lacks anything, or none is there."""
    with tempfile.TemporaryDirectory() as folder:
        checked = [library for path in paths for library in libraries(Path(path), Path(folder))]
        wrong = [f"{library.name} lacks {', '.join(lacks)}" for library in checked if (lacks := missing(library))]
    if wrong or not checked:
        raise SystemExit("; ".join(wrong) or "there is no native code to check")
    print(f"hardened: {', '.join(library.name for library in checked)}")


if __name__ == "__main__":
    main(sys.argv[1:])
