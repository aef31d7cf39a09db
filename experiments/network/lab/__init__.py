"""A network that can be set, on one machine: hosts as network namespaces on a bridge, behind limited links."""

from .config import NetlabConfig, backend_here, check_lab, labels
from .launcher import again, run_inside

__all__ = ["NetlabConfig", "again", "backend_here", "check_lab", "labels", "run_inside"]
