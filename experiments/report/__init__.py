"""Results as one HTML file that needs nothing beside it."""

from .command import ReportConfig, report_command
from .page import write_report

__all__ = ["ReportConfig", "report_command", "write_report"]
