"""The cost of a step, and the times of its events."""
