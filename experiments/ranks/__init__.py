"""Ranks: processes that a launcher or this machine starts, the process group that they join, and their end."""
