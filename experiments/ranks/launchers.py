"""Facts about a command's ranks from the environment: a network lab, threads."""

from __future__ import annotations

import os

LAB_VARIABLE = "GRADWIRE_NETLAB"  # in the environment of every rank in a lab: what the lab is like


def lab_here() -> str | None:
    """The lab that this process runs in, such as `4 hosts at 100 Mbit/s`; None where it runs in none."""
    return os.environ.get(LAB_VARIABLE) or None


def threads_here(asked: int, nproc: int) -> int:
    """Torch's threads for a rank: `asked`, or for 0 an equal share of the cores among the ranks on this host.

    These are all ranks in a lab, those of the launcher, or else `nproc`.
    """
    variable = "WORLD_SIZE" if lab_here() else "LOCAL_WORLD_SIZE"
    sharing = int(os.environ.get(variable, nproc))
    return asked or max(1, (os.cpu_count() or 1) // sharing)
