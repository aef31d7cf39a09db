"""`gradwire replay`: steps that were measured on an emulated accelerator, predicted, drawn, and told for more hosts."""

from .command import ReplayConfig, replay_command

__all__ = ["ReplayConfig", "replay_command"]
