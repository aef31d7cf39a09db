"""An emulated network: hosts as network namespaces of one computer, on a bridge, behind limited links."""

from .config import NetlabConfig, backend_here, check_lab, labels
from .launcher import rerun_on_hosts, run_on_hosts

__all__ = ["NetlabConfig", "backend_here", "check_lab", "labels", "rerun_on_hosts", "run_on_hosts"]
