"""`gradwire check`: averages, checkpoints and step times on the ranks and GPUs that are there."""
