"""What a lab needs of the machine: Linux, root and iproute2."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("ip", "tc")
INSTEAD = "or emulate the link in user space: gradwire compare --link 100mbit"


class NetlabError(ValueError):
    """There can be no lab here; the message has the reason and what to do instead."""


def require() -> None:
    """Raise NetlabError where no lab can be made."""
    if sys.platform != "linux":
        raise NetlabError(f"hosts are network namespaces, which only Linux has: run this there, {INSTEAD}")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NetlabError(f"{' and '.join(missing)} not found: install iproute2 (apt install iproute2), {INSTEAD}")
    if os.geteuid() != 0:
        script = Path(sys.executable).with_name("gradwire")  # `-m` would look for modules in the current folder first
        again = f"sudo -E {script if script.exists() else f'{sys.executable} -m gradwire'} {shlex.join(sys.argv[1:])}"
        raise NetlabError(f"network namespaces can be made by root only: {again}; {INSTEAD}")


def run(*words: str) -> str:
    """Run a command of iproute2; what it prints. Raises NetlabError with what it says where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise NetlabError(
            f"`{shlex.join(words)}` failed: {said}. A container needs the capabilities NET_ADMIN and SYS_ADMIN; "
            f"grant them, {INSTEAD}"
        )
    return done.stdout
