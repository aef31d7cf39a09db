"""A network that can be set, on one machine: hosts as network namespaces on a bridge, behind limited links."""

from .config import NetlabConfig, here, labels
from .ranks import again, run_inside

__all__ = ["NetlabConfig", "again", "here", "labels", "run_inside"]
