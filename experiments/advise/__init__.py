"""`gradwire advise`: whether to compress on these hosts, and how."""

from .command import AdviseConfig, advise_command

__all__ = ["AdviseConfig", "advise_command"]
