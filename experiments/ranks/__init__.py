"""Ranks: processes that a launcher or this host starts, the process group that they join, and their end."""
